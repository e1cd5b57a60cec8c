# SPDX-License-Identifier: Apache-2.0
"""Heads of the DFlash family whose drafts are right, for `target_models.py`'s targets.

A query gets one part of its token from the target's states, and the other from the
block's first token (DFlash), or from the token before (DFlash2, DSpark, by their small
head). So a draft is right only if states, positions, slots, the block's first token and
the conditional scores are.
"""

from pathlib import Path
from typing import Any

import torch

from tests.checkpoints.tensors import Tensors, random, shapes_of, write_checkpoint

from .target_models import (
    DRAFTER,
    FILLER,
    HEAD_DIM,
    LAYERS,
    MASK,
    SIZE,
    TOKENS,
    VOCAB,
    WIDTH,
    A,
    B,
    K,
    _layer,
    _tables,
    directions,
    parts,
)

NEAREST = 2  # slots before a query: its block's first token, or the last verified one
RANK, GROUP, TAPS = A + B, 16, 2
CANDIDATES = 16
TAPPED = list(range(LAYERS - 1))


def _backbone(is_anchor_first: bool) -> Tensors:
    """A layer that counts on from the target's states, and the block's first token; a
    query predicts its own position, or the one after it."""
    tokens = torch.arange(VOCAB)
    embedded, said = parts(tokens), parts(tokens)
    embedded[:, :A] = 0
    if not is_anchor_first:
        said[:TOKENS] = parts((tokens[:TOKENS] + 1) % TOKENS)
    layer = _layer("layers.0", NEAREST, WIDTH)
    for norm, weight in (("q_norm", 60.0), ("k_norm", 1.0)):
        layer[f"layers.0.self_attn.{norm}.weight"] = torch.full((HEAD_DIM,), weight)
    combine = torch.zeros(WIDTH, SIZE)
    combine[: A + B], combine[FILLER] = directions()[: A + B], directions()[A + B]
    made = _tables(embedded, said) | layer
    made |= {name: torch.ones(WIDTH) for name in ("norm.weight", "hidden_norm.weight")}
    made["fc.weight"] = combine.repeat(1, len(TAPPED))
    return made


def _successors() -> tuple[torch.Tensor, torch.Tensor]:
    """[VOCAB, RANK] each, whose products are the larger the more a token follows."""
    tokens = torch.arange(VOCAB)
    after = parts(tokens)
    after[:TOKENS] = parts((tokens[:TOKENS] + 1) % TOKENS)
    return after, parts(tokens)


def _only_first_part(made: Tensors) -> None:
    made["lm_head.weight"][:, A : A + B] = 0


def _dflash() -> tuple[dict[str, Any], Tensors]:
    block = {"mask_token_id": MASK, "target_layer_ids": TAPPED}
    config = {"architectures": ["DFlashDraftModel"], "block_size": K + 1}
    return config | {"dflash_config": block}, _backbone(is_anchor_first=False)


def _dflash2() -> tuple[dict[str, Any], Tensors]:
    config, made = _dflash()
    _only_first_part(made)
    config["architectures"] = ["DFlash2DraftModel"]
    config["dflash_config"] |= {
        "block_size": config.pop("block_size"),
        "conv_kernel_size": TAPS,
        "conv_group_size": GROUP,
        "selector_rank": RANK,
        "selector_top_k": CANDIDATES,
    }
    identity = torch.zeros(2, TAPS, WIDTH)
    identity[:, 0] = 1
    for conv in ("attention_conv", "mlp_conv"):
        made[f"layers.0.{conv}.base_kernel"] = identity.clone()
        dynamic = torch.zeros(2 * TAPS * WIDTH // GROUP, WIDTH)
        made[f"layers.0.{conv}.kernel_projection.weight"] = dynamic
    before, after = _successors()
    hidden = torch.zeros(RANK, WIDTH)
    hidden[:, FILLER] = 400  # whatever a mask's query has gathered, it has this
    selector = "candidate_selector."
    made[selector + "predecessor_codebook"] = before
    made[selector + "successor_codebook"] = after
    made[selector + "hidden_projection.weight"] = hidden
    return config, made


def _dflash2_taps() -> tuple[dict[str, Any], Tensors]:
    """Rows mix with those before them in their block: nothing that is right."""
    config, made = _dflash2()
    for conv in ("attention_conv", "mlp_conv"):
        kernel = made[f"layers.0.{conv}.base_kernel"]
        kernel[:, 1:] = random(conv, *kernel[:, 1:].shape) * 40
    return config, made


def _dspark() -> tuple[dict[str, Any], Tensors]:
    made = _backbone(is_anchor_first=True)
    _only_first_part(made)
    before, after = _successors()
    before[:, :A] = 0
    made["markov_head.markov_w1.weight"] = before * 30
    made["markov_head.markov_w2.weight"] = after
    config = {
        "architectures": ["Qwen3DSparkModel"],
        "block_size": K,
        "mask_token_id": MASK,
        "target_layer_ids": TAPPED,
        "markov_rank": RANK,
        "markov_head_type": "vanilla",
        "enable_confidence_head": False,
    }
    return config, made


def _lilicorr() -> tuple[dict[str, Any], Tensors]:
    """Random: its scores are not of tokens alone, so nothing can be planted."""
    topk, factor, heads = 4, 8, 2
    config, _ = _dflash()
    config |= {"architectures": ["LiLiCorrDraftModel"], "hidden_size": SIZE}
    config["dflash_config"] |= {
        "block_size": config.pop("block_size"),
        "lilicorr_candidate_topk": topk,
        "lilicorr_hidden_size": 0,
        "lilicorr_num_layers": 1,
        "lilicorr_num_heads": heads,
        "lilicorr_mlp_ratio": 1.0,
        "lilicorr_factor_dim": factor,
        "lilicorr_vector_eps": 1e-6,
        "lilicorr_logit_scale": 9.0,
    }
    shapes = {
        name.removeprefix("model."): shape
        for name, shape in shapes_of(DRAFTER | config | {"model_type": "qwen3"}).items()
        if "embed" not in name and "lm_head" not in name
    }
    shapes |= {"fc.weight": (SIZE, len(TAPPED) * SIZE), "hidden_norm.weight": (SIZE,)}
    square = "pass_hidden_proj", "context_proj", "feature_mlp.down_proj"
    square += tuple(f"layers.0.{n}" for n in ("attn.out_proj", "mlp.up_proj"))
    square += ("layers.0.mlp.down_proj",)
    outputs = "in_head", "out_head", "anchor_out_head"
    linear = dict.fromkeys(square, (SIZE, SIZE)) | dict.fromkeys(
        outputs, (factor, SIZE)
    )
    linear |= {"feature_norm": (5,), "feature_mlp.up_proj": (SIZE, 5)}
    linear |= {"factor_input_proj": (SIZE, 3 * SIZE)}
    norms = "layers.0.attn_norm", "layers.0.mlp_norm", "output_norm", "anchor_norm"
    head = {f"{name}.weight": shape for name, shape in linear.items()}
    head |= {f"{name}.bias": shape[:1] for name, shape in linear.items()}
    head |= {f"{norm}.weight": (SIZE,) for norm in norms} | {
        "slot_embedding": (1, 1, K, 1, SIZE),
        "rank_embedding": (1, 1, 1, topk, SIZE),
        "relative_slot_bias": (heads, 2 * K + 1),
        "same_slot_bias": (heads,),
        "layers.0.attn.in_proj_weight": (3 * SIZE, SIZE),
        "layers.0.attn.in_proj_bias": (3 * SIZE,),
    }
    shapes |= {f"lilicorr.{name}": shape for name, shape in head.items()}
    return config, {name: random(name, *shape) for name, shape in shapes.items()}


KINDS = {
    "dflash": _dflash,
    "dflash2": _dflash2,
    "dflash2_taps": _dflash2_taps,
    "dspark": _dspark,
    "lilicorr": _lilicorr,
}


def save_block_head(kind: str, folder: Path) -> Path:
    """Saves a head of a kind in `KINDS`."""
    config, tensors = KINDS[kind]()
    config = DRAFTER | {"model_type": "qwen3", "target_hidden_size": SIZE} | config
    return write_checkpoint(folder, config, tensors)
