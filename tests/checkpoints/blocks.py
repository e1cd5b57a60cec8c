# SPDX-License-Identifier: Apache-2.0
"""Published drafters of the DFlash family, scaled down, for `targets/qwen3.json`.

Their config.json files are in `published/`. Of their weights there are only names and
shapes: heads that draft what is right are in `tests/v1/e2e/block_heads.py`.
"""

import json
from dataclasses import dataclass, field
from typing import Any

from .families import HERE, VOCAB
from .tensors import EMBED, LM_HEAD, Config, shapes_of

Shapes = dict[str, tuple[int, ...]]
REDUCED = 640  # rows of an lm_head of its own


@dataclass(frozen=True)
class Block:
    """A published drafter, and how it must be detected."""

    method: str
    architecture: str  # vLLM's name of its class
    num_drafts: int
    has_known_row: bool = True  # the first row of its block predicts nothing
    causal: tuple[bool, bool] = (False, False)  # by layer: rows see only earlier ones
    tables: tuple[str, ...] = ()  # embeddings and an lm_head of its own
    no_lattice: str | None = None  # why it drafts no trees
    head: Any = field(default=lambda config: {})  # its tensors beside a transformer's


def read(name: str) -> dict[str, Any]:
    """The config.json of a drafter in BLOCKS."""
    return json.loads((HERE / f"published/{name}.json").read_text())


def block_shapes(name: str) -> Shapes:
    """Names and shapes of a drafter's tensors."""
    config, block = read(name), BLOCKS[name]
    config |= config.pop("transformer_layer_config", {}) | config.get(
        "dflash_config", {}
    )
    hidden, own = config["hidden_size"], {"model.norm.weight"}
    model = shapes_of({k: v for k, v in config.items() if k != "dflash_config"})
    made = {
        each.removeprefix("model."): shape
        for each, shape in model.items()
        if ".layers." in each or each in own | set(block.tables)
    }
    made |= {"fc.weight": (hidden, 3 * hidden), "hidden_norm.weight": (hidden,)}
    if config.get("draft_vocab_size") == REDUCED:
        made |= {"d2t": (REDUCED,), "t2d": (VOCAB,), LM_HEAD: (REDUCED, hidden)}
    return made | block.head(config)


def _dflash2(config: Config) -> Shapes:
    hidden, taps = config["hidden_size"], config["conv_kernel_size"]
    rank, rows = config["selector_rank"], 2 * taps * hidden // config["conv_group_size"]
    made = {
        f"candidate_selector.{name}_codebook": (VOCAB, rank)
        for name in ("predecessor", "successor")
    }
    made["candidate_selector.hidden_projection.weight"] = (rank, hidden)
    for layer in range(config["num_hidden_layers"]):
        for conv in ("attention_conv", "mlp_conv"):
            made[f"layers.{layer}.{conv}.base_kernel"] = (2, taps, hidden)
            name = f"layers.{layer}.{conv}.kernel_projection.weight"
            made[name] = (rows, hidden)
    return made


def _dspark(config: Config) -> Shapes:
    rank, rows = config["markov_rank"], config.get("draft_vocab_size") or VOCAB
    return {
        "markov_head.markov_w1.weight": (VOCAB, rank),
        "markov_head.markov_w2.weight": (rows, rank),
        "confidence_head.proj.weight": (1, config["hidden_size"] + rank),
        "confidence_head.proj.bias": (1,),
    }


def _xpress(config: Config) -> Shapes:
    hidden, rank, mlp = (
        config[key] for key in ("hidden_size", "xpress_rank", "xpress_mlp_hidden")
    )
    size = config["xpress_block_size"]
    shapes = {
        "w1.weight": (VOCAB, rank),
        "down_h.weight": (rank, hidden),
        "down_g.weight": (rank, hidden),
        "in_proj.weight": (rank, 3 * rank),
        "mix.L": (rank, size, size),
        "mlp.gate_proj.weight": (mlp, rank),
        "mlp.up_proj.weight": (mlp, rank),
        "mlp.down_proj.weight": (rank, mlp),
        "w2.weight": (VOCAB, rank),
    }
    return {f"xpress_head.{name}": shape for name, shape in shapes.items()}


_OWN = (EMBED, LM_HEAD)
_PATH = "DFlashQwen3XPressModel, whose scores depend on the whole path"
_DFLASH, _DFLASH2 = ("dflash", "DFlashDraftModel"), ("dflash", "DFlash2DraftModel")
_DSPARK = ("dspark", "Qwen3DSparkModel")
BLOCKS: dict[str, Block] = {
    # z-lab's first, with attention in both directions in a block; a later one says so
    # beside layers that have a window.
    "dflash-zlab": Block(*_DFLASH, 15),
    "dflash2-zlab": Block(*_DFLASH2, 7, head=_dflash2),
    # RedHatAI's, as speculators writes them: a window that is causal or not, all layers
    # or some, a reduced vocabulary.
    "speculators-dflash": Block(*_DFLASH, 7, causal=(True, False)),
    "speculators-dflash2": Block(*_DFLASH2, 7, head=_dflash2),
    "speculators-dspark": Block(*_DSPARK, 8, False, head=_dspark),
    # deepseek-ai's: whole heads, and DFlash with DSpark's rows and class.
    "dspark-deepseek": Block(*_DSPARK, 7, False, tables=_OWN, head=_dspark),
    "dflash-deepseek": Block(*_DSPARK, 7, False, tables=_OWN),
    # SpecForge's nests the head's keys.
    "dspark-specforge": Block(*_DSPARK, 8, False, head=_dspark),
    # JetSpec: causal in a block. NeMo has other names.
    "jetspec-nemo": Block(*_DFLASH, 15, causal=(True, True)),
    # ModelOpt's window is beside layers with full attention.
    "dflash-modelopt": Block(*_DFLASH, 7),
    "xpress-uiuc": Block(
        "dflash", "DFlashQwen3XPressModel", 15, no_lattice=_PATH, head=_xpress
    ),
}
