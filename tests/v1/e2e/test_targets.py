# SPDX-License-Identifier: Apache-2.0
"""Each cell of the tables in `docs/targets.md`: a target with a kind of drafter.

Greedy and sampled output equal the target's, and the drafts, which are right by
construction, are accepted; or it is refused or restricted as the table says.
"""

import random
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoints.quantized import FORMATS, quantize
from vllm.config.drafter import resolve
from vllm.lora.request import LoRARequest

from .block_heads import KINDS, save_block_head
from .hooks import drafter_name, scale_kv_caches, take_defaults_of_a_gpu, update_weights
from .image_targets import IMAGE_TARGETS, picture, register_model, save_image_target
from .mtp_targets import MTP_TARGETS, save_mtp_target
from .runner import BOUND, NUM_DEVICES, EngineError, Request, Served
from .target_models import (
    NUM_TOKENS,
    SAVE,
    TARGETS,
    TOKENS,
    K,
    greedy_output,
    prompt,
    save_adapter,
    save_target,
)
from .watches import Drafts

TABLE = Path(__file__).parents[3] / "docs/targets.md"
NODES, SHORT = 12, 2
TREE = {"draft_tree": NODES}
# Trees and chains by turns: the chains are shorter, and so are their blocks.
TURNS = TREE | {"num_speculative_tokens_per_batch_size": [[1, 2, NODES], [3, 4, SHORT]]}
DRAFTERS = {
    "draft model": "",  # the target itself
    "PARD": "pard",
    "PARD-2": "pard2",
    "EAGLE-3": "eagle3",
    "P-EAGLE": "peagle",
    "DFlash": "dflash",
}
PROBABILISTIC = {"draft_sample_method": "probabilistic"}
# Drafter and settings of each column.
COLUMNS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (drafter, {}) for name, drafter in DRAFTERS.items()},
    **{f"{name}'s trees": (drafter, TREE) for name, drafter in DRAFTERS.items()},
    # So that drafts of sampled requests are right, too.
    "draft model": ("", PROBABILISTIC),
}
MTP_COLUMNS = {"chains": ("mtp", {}), "trees": ("mtp", TREE)}
BY_ARGMAX = {"use_local_argmax_reduction": True}  # ranks exchange their best tokens
WHOLE = {"draft_tensor_parallel_size": 1}
RANKS, GRAPHS = "TP 2", "CUDA graphs"
FAMILY = {
    f"{name}{how}": (kind, settings)
    for name, kind in {"DFlash2": "dflash2", "DSpark": "dspark"}.items()
    for how, settings in {"": {}, "'s trees": TREE, " by turns": TURNS}.items()
} | {"DFlash by turns": ("dflash", TURNS), "LiLiCorr by turns": ("lilicorr", TURNS)}
# Cells that are not in the tables, by row: all but one are "yes".
MORE: dict[str, dict[str, tuple[str, dict[str, Any]]]] = {
    "Llama": FAMILY,
    RANKS: {
        "draft model by argmax": ("", BY_ARGMAX),
        "PARD by argmax": ("pard", BY_ARGMAX),
        "EAGLE-3 by argmax": ("eagle3", BY_ARGMAX),
        "PARD probabilistic": ("pard", PROBABILISTIC),
        "EAGLE-3 probabilistic": ("eagle3", PROBABILISTIC),
        "whole draft model": ("", WHOLE),
        "whole draft model's trees": ("", WHOLE | TREE),
        "whole PARD's trees": ("pard", WHOLE | TREE),
        "whole PARD-2": ("pard2", WHOLE),
        "whole PARD-2 probabilistic": ("pard2", WHOLE | PROBABILISTIC),
        "whole EAGLE-3": ("eagle3", WHOLE),
    },
    # Heads of DFlash2 and LiLiCorr are compiled for one length of block.
    GRAPHS: {
        column: (COLUMNS | FAMILY)[column]
        for column in (
            *("DFlash's trees", "DSpark's trees"),
            *(f"{name} by turns" for name in ("DSpark", "DFlash2", "LiLiCorr")),
        )
    },
}
ENGINE = {
    "max_model_len": 160,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 48,
    "skip_tokenizer_init": True,
}
CONNECTED, UPDATED = "KV connector", "weights updated"
# Rows of the second table: a Llama with these engine arguments. With LoRA every other
# request has an adapter, which drafters ignore; LoRA needs a budget for all drafts.
BESIDE: dict[str, dict[str, Any]] = {
    "LoRA": {"enable_lora": True, "max_num_batched_tokens": 64},
    "fp8 KV cache": {"kv_cache_dtype": "fp8"},
    "fp8": {"quantization": "fp8_per_channel"},
    **{name: {} for name in FORMATS},
    UPDATED: {},
    CONNECTED: {"block_size": 32, "max_num_batched_tokens": 512},
    # Without the defaults of a GPU a CPU refuses it: `tests/config/test_drafter.py`.
    "PP 2": {
        "pipeline_parallel_size": 2,
        "async_scheduling": True,
        "setup": [take_defaults_of_a_gpu],
        "env": BOUND,
    },
    RANKS: {"tensor_parallel_size": 2, "env": BOUND},
    GRAPHS: {"enforce_eager": False, "compilation_config": {"mode": 3}},
}
# Engine arguments of targets that take images. SHOWN: images of the requests with these
# prompt lengths, as rows and columns of cells, before the text and within it.
WITH_IMAGES: dict[str, Any] = {
    "skip_tokenizer_init": False,
    "limit_mm_per_prompt": {"image": 2, "video": 0},
}
SHOWN: dict[int, list[tuple[int, int]]] = {20: [(3, 4)], 70: [(2, 3), (4, 4)]}
# Targets for whose layers vLLM has no float32 kernels, on a CPU and on a GPU.
NO_FLOAT32 = dict.fromkeys(("fp8", "GPTQ", "AWQ", "Qwen3-Next's"), "bfloat16")
ON_CPU = NO_FLOAT32 | {"Qwen3-Next": "bfloat16"}
OTHERS = "DeepSeek-V2", "DeepSeek-V3's", "LoRA", "int8 W8A8"
ON_GPU = NO_FLOAT32 | dict.fromkeys(OTHERS, "bfloat16")
# Targets whose rounding, and so sampled output, depends on the batch: a sixteenth in
# fp8.
ROUNDED_ON_CPU = {"fp8"}
ROUNDED_ON_GPU = {*ON_GPU, "fp8 KV cache"} - MTP_TARGETS.keys()
if torch.cpu._is_amx_tile_supported():  # with its int8 kernel both are true of int8
    ON_CPU["int8 W8A8"] = "bfloat16"
    ROUNDED_ON_CPU.add("int8 W8A8")
GPU_BACKENDS = [
    pytest.param(name, marks=pytest.mark.gpu) for name in ("TRITON_ATTN", "FLASH_ATTN")
]
ACCEPTED = 0.95  # least share of drafts accepted at each position
LENGTHS = (9, 20, 45, 70)
BEHIND_BLOCKS = (34, 66, 98)  # all tokens but the last two are loaded
# Log line or error of a cell's content; "yes" has none of them.
SAID = {
    "refused": "do(es)? not support|layers with a state",
    "as PARD": "drafts without the target's hidden states",
    "chains": "Draft trees are not used",
    "one state missing": "PARD-2 drafts without that of its last token",
    "split": "split in 2, as the target is",
}
NOT_ON_CPU = "refused on a CPU"
# A chain instead of a tree of fixed size, adapters applied to all rows of logits, a
# pairwise and a Markov head, an MTP module.
FAST = ("Nemotron-H, PARD's trees", "LoRA, EAGLE-3", "MiMo's, trees")
FAST += ("Llama, DFlash2's trees", "Llama, DSpark by turns")


def read_tables() -> dict[str, str]:
    """Cells of the page's tables, by "row, column"."""
    cells, head = {}, []
    for line in TABLE.read_text().splitlines():
        name, *row = (cell.strip() for cell in line.strip("|").split("|"))
        if name in ("target", "MTP module"):
            head = row
        elif name in (*TARGETS, *IMAGE_TARGETS, *BESIDE) and row:
            rows = zip(head, row, strict=True)
            cells |= {f"{name}, {column}": cell for column, cell in rows}
    return cells


TABLES = read_tables()
# The connector of the test does not save DFlash's K/V.
CELLS = {cell: content for cell, content in TABLES.items() if content != "–"}
CELLS |= {f"{row}, {column}": "yes" for row in MORE for column in MORE[row]}
CELLS[f"{RANKS}, whole EAGLE-3"] = "split"


def engine(name: str, folder: Path, on_cpu: bool) -> dict[str, Any]:
    """Arguments of `vllm_runner` for a target."""
    dtypes = ON_CPU if on_cpu else ON_GPU
    given = ENGINE | {"model": folder, "dtype": dtypes.get(name, "float32")}
    if on_cpu and name.startswith("DeepSeek"):
        # MLA takes minutes there, and its block size differs from the drafters'.
        given["env"] = {"VLLM_MLA_DISABLE": "1"}
    if name in IMAGE_TARGETS:
        return given | WITH_IMAGES | {"setup": [partial(register_model, str(folder))]}
    return given | BESIDE.get(name, {})


def lengths(name: str) -> tuple[int, ...]:
    return BEHIND_BLOCKS if name == CONNECTED else LENGTHS


def requests_of(
    name: str, folders: dict[str, Path], images: int = 0, **params: Any
) -> list[Request]:
    """Requests for a target; with `images` each has other images, by that seed."""
    requests = []
    for number, length in enumerate(lengths(name)):
        text: Any = prompt(length)
        if name in IMAGE_TARGETS and length in SHOWN:
            image, sides = IMAGE_TARGETS[name].image(), SHOWN[length]
            middle = text[: length // 2] + image if len(sides) > 1 else []
            tokens = image + middle + text[len(middle) and length // 2 :]
            shown = {"image": [picture(*each, images) for each in sides]}
            text = {"prompt_token_ids": tokens, "multi_modal_data": shown}
        adapter = None
        if name == "LoRA" and number % 2:
            adapter = LoRARequest("adapter", 1, str(folders["adapter"]))
        seed = {"seed": number} if params else {}
        more = params | seed
        requests.append(Request(text, NUM_TOKENS, lora_request=adapter, **more))
    return requests


DRAWN = {"temperature": 1.5}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("targets")
    return {
        "targets": folder,
        "before": save_target("Llama", folder / "before", seed=1),
        "adapter": save_adapter(folder / "adapter"),
        **{kind: save(folder / kind) for kind, save in SAVE.items()},
        **{kind: save_block_head(kind, folder / kind) for kind in KINDS},
        # These, and PARD-2, depend on slots whose KV is loaded.
        **{
            f"far-{kind}": SAVE[kind](folder / f"far-{kind}", nearest=nearest)
            for kind, nearest in {"pard": 3, "eagle3": 4, "peagle": 4}.items()
        },
    }


@pytest.fixture(scope="module")
def target_of(folders) -> Callable[[str], Path]:
    """Returns a target's folder, which is created on demand."""

    @cache
    def get(name: str) -> Path:
        folder = folders["targets"] / name
        if name in IMAGE_TARGETS:
            return save_image_target(IMAGE_TARGETS[name], folder)
        if name in MTP_TARGETS:
            return save_mtp_target(name, folder)
        save_target("Llama" if name in BESIDE else name, folder)
        if name in FORMATS:
            quantize(folder, name)
        return folder

    return get


@pytest.fixture(scope="module")
def alone(target_of, folders, vllm_runner, on_cpu: bool):
    """Output of a target without drafts, greedy and drawn.

    Greedy output counts on; sampled output differs, and depends on all layers.
    """

    @cache
    def get(name: str) -> tuple[list[list[int]], list[list[int]]]:
        requests = requests_of(name, folders)
        with vllm_runner(**engine(name, target_of(name), on_cpu)) as llm:
            greedy = llm.generate(requests).tokens
            drawn = llm.generate(requests_of(name, folders, **DRAWN)).tokens
            if name in IMAGE_TARGETS:
                asked = requests_of(name, folders, images=1, **DRAWN)
                others = llm.generate(asked).tokens
                is_same = [a == b for a, b in zip(drawn, others, strict=True)]
                assert is_same == [isinstance(one.prompt, list) for one in asked]
        assert greedy == [greedy_output(length) for length in lengths(name)]
        assert drawn != greedy
        return greedy, drawn

    return get


def connector(folder: Path) -> dict[str, Any]:
    """A KV connector with files: an engine loads what it finds, and saves the rest."""
    extra = {"shared_storage_path": str(folder)}
    named = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}
    return {"kv_transfer_config": named | {"kv_connector_extra_config": extra}}


def acceptance(served: Served, count: int = K) -> list[float]:
    """Share of the drafts at each position that was accepted."""
    accepted = served.counters["num_accepted_tokens_per_pos"][:count]
    return [each / served.count("num_drafts") for each in accepted]


def marked(cell: str) -> Any:
    marks = [] if cell in FAST else [pytest.mark.slow]
    return pytest.param(cell, marks=marks)


def content(cell: str, settings: dict[str, Any], on_cpu: bool) -> str:
    """What a cell says of this machine; skips if it says nothing of it."""
    name, expected = cell.split(", ")[0], CELLS[cell]
    is_tree = "draft_tree" in settings
    if on_cpu and name.startswith("DeepSeek") and is_tree:
        pytest.skip("needs a GPU: on a CPU it runs without MLA")
    if name in (RANKS, "PP 2") and NUM_DEVICES < 2:
        pytest.skip("needs two GPUs, or two cores")
    return expected.removesuffix(NOT_ON_CPU).removesuffix(", ") or "yes"


@pytest.mark.parametrize("cell", [*map(marked, CELLS)])
def test_table_cell(
    cell: str, target_of, alone, folders, vllm_runner, on_cpu: bool, tmp_path: Path
):
    name, column = cell.split(", ")
    drafter, settings = (COLUMNS | MTP_COLUMNS | MORE.get(name, {}))[column]
    expected = content(cell, settings, on_cpu)
    folder = target_of(name)
    served = folders["before"] if name == UPDATED else folder
    own = folders.get(drafter, served)
    if name == CONNECTED:
        own = folders.get(f"far-{drafter}", own)
    spec = {"num_speculative_tokens": K} | settings
    spec |= {"method": "mtp"} if drafter == "mtp" else {"model": str(own)}
    if not drafter:
        quantization = BESIDE.get(name, {}).get("quantization")  # as the target is
        spec |= {"method": "draft_model", "quantization": quantization}

    given = engine(name, served, on_cpu) | {"speculative_config": spec}
    if name == CONNECTED:
        given |= connector(tmp_path / "kv")
    if expected == "chains":  # on a GPU a warm-up asks for trees first
        given |= {"enforce_eager": False, "compilation_config": {"mode": 0}}
    if expected == "refused":
        error = rf"ConfigError[\s\S]*({SAID[expected]})"  # before weights load
        with pytest.raises(EngineError, match=error):
            vllm_runner(**given)
        return
    if name == CONNECTED:
        prefill(vllm_runner, given)
    wanted, wanted_drawn = alone("Llama" if name == GRAPHS else name)
    is_rounded = name in (ROUNDED_ON_CPU if on_cpu else ROUNDED_ON_GPU)
    with vllm_runner(**given) as llm:
        if name == UPDATED:
            before = llm.generate(requests_of(name, folders, **DRAWN))
            assert before.tokens != wanted_drawn
            llm.call(update_weights, target=str(folder))
        greedy = llm.generate(requests_of(name, folders))
        drawn = llm.generate(requests_of(name, folders, **DRAWN))
        in_trees = drawn
        if settings is TURNS:  # few requests have trees
            in_trees = llm.generate(requests_of(name, folders, **DRAWN)[:2])
        logged = {what for what, words in SAID.items() if words in llm.log}
        assert drafter != "mtp" or llm.call(drafter_name) == "EagleDrafter"
        is_narrow = "Each pass of a draft tree continues one node" in llm.log
    assert logged == {what for what in expected.split(", ") if what != "yes"}
    assert greedy.tokens == wanted
    assert drawn.tokens == wanted_drawn or is_rounded
    assert in_trees.tokens == drawn.tokens[: len(in_trees.tokens)]
    if name == CONNECTED:
        loaded = greedy.count("external_prefix_cache_hits")
        assert loaded == sum(length - 2 for length in BEHIND_BLOCKS)
    if "as PARD" not in logged and drafter != "lilicorr":
        longest = SHORT if settings is TURNS else K
        assert min(acceptance(greedy, longest)) >= ACCEPTED
    # A draft model ignores adapters and images, and its weights are not updated.
    is_drawn = settings == PROBABILISTIC and not drafter
    if is_drawn and name not in ("LoRA", UPDATED, *IMAGE_TARGETS):
        assert min(acceptance(drawn)) >= ACCEPTED
    is_tree = "draft_tree" in settings and "chains" not in logged
    if is_tree and drafter != "lilicorr":
        ranks = in_trees.counters["num_accepted_tree_nodes"]
        assert ranks[0] > 0 and not (is_narrow and drafter == "mtp")
        # Of other drafters the second best is hardly likelier than any other.
        if column in ("DFlash2's trees", "DSpark's trees", "trees"):
            assert sum(ranks[1:]) > 0


@pytest.mark.slow
@pytest.mark.parametrize("column", ["PARD", "PARD's trees", "EAGLE-3's trees"])
@pytest.mark.parametrize("backend", ["CPU_ATTN", *GPU_BACKENDS])
def test_scales_of_fp8_kv_cache(
    backend: str, column: str, target_of, folders, vllm_runner, on_cpu: bool
):
    """A tree's output is a chain's, with all attention that reads such a KV cache."""
    if on_cpu != (backend == "CPU_ATTN"):
        pytest.skip("an attention backend of other devices")
    if not on_cpu and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs a GPU with FlashAttention 3")
    (drafter, settings), name = COLUMNS[column], "fp8 KV cache"
    spec = {"model": str(folders[drafter]), "num_speculative_tokens": K} | settings
    given = engine(name, target_of(name), on_cpu) | {"speculative_config": spec}
    given |= {"dtype": "bfloat16", "attention_backend": None if on_cpu else backend}
    with vllm_runner(**given, enforce_eager=on_cpu) as llm:
        llm.call(scale_kv_caches)
        served = llm.generate(requests_of(name, folders))
        assert SAID["chains"] not in llm.log
    assert served.tokens == [greedy_output(length) for length in LENGTHS]
    assert min(acceptance(served)) >= ACCEPTED


def prefill(vllm_runner, given: dict[str, Any]) -> None:
    """Saves the prompts' KV, which the next engine with these arguments loads."""
    with vllm_runner(**given) as llm:
        llm.generate([Request(prompt(length), 1) for length in BEHIND_BLOCKS])


def leave_mtp_to_vllm() -> None:
    resolve.MTP_MODULES = ()


@pytest.mark.slow
@pytest.mark.parametrize("length", (K, SHORT))
@pytest.mark.parametrize("kind", [*KINDS, *MTP_TARGETS])
def test_chains_are_those_of_vllm(
    kind: str, length: int, target_of, folders, vllm_runner, on_cpu: bool
):
    """For any text. Of the DFlash family only engines with trees are this tree's."""
    spec: dict[str, Any] = {"num_speculative_tokens": length}
    if kind in KINDS:
        name, ours, setup = "Llama", TREE | {"num_speculative_tokens": K}, []
        ours["num_speculative_tokens_per_batch_size"] = [[1, 4, length]]
        spec["model"] = str(folders[kind])
    else:
        name, ours, setup = kind, {}, [leave_mtp_to_vllm]
        spec["method"] = "mtp"
    rng, drafts, names = random.Random(kind), [], []
    texts = [[rng.randrange(TOKENS) for _ in range(9 + 7 * i)] for i in range(4)]
    given = engine(name, target_of(name), on_cpu)
    for more, first in ((ours, []), ({}, setup)):
        start = {"speculative_config": spec | more, "setup": first}
        with vllm_runner(**given | start) as llm:
            names.append(llm.call(drafter_name))
            llm.watch(Drafts)
            served = llm.generate([Request(text, 24) for text in texts])
        drafts.append(sorted(served.drafts))
    assert names[0].startswith("Tree") == (kind in KINDS)
    assert names[1].endswith("Speculator") and not names[0].endswith("Speculator")
    assert drafts[0] == drafts[1]


@pytest.mark.slow
def test_mtp_module_in_fp8_within_a_window(target_of, vllm_runner):
    """With "auto", whose first timed step in bfloat16 is one row on AMX."""
    spec: dict[str, Any] = {"method": "mtp", "draft_window": 64}
    spec |= {"quantization": "fp8_per_channel", "draft_lm_head_quantization": "fp8"}
    given = ENGINE | {"model": target_of("MiMo's"), "dtype": "bfloat16"}
    with vllm_runner(**given, speculative_config=spec) as llm:
        served = llm.generate(requests_of("MiMo's", {}))
        assert "a fp8 copy of the lm_head" in llm.log
        assert llm.call(weight_dtype) == "torch.float8_e4m3fn"
    assert served.tokens == [greedy_output(length) for length in LENGTHS]
    drafted, accepted = map(served.count, ("num_draft_tokens", "num_accepted_tokens"))
    assert accepted > 0.8 * drafted > 0  # the last steps draft more than is asked for


def weight_dtype(made: Any) -> str:
    """Of the module's first projection."""
    (layer,) = made.speculator.model.model.mtp_layers.values()
    return str(layer.mtp_block.self_attn.qkv_proj.weight.dtype)


def test_table_is_complete():
    rows = {*TARGETS, *IMAGE_TARGETS, *BESIDE} - {*MTP_TARGETS, GRAPHS}
    wanted = {f"{row}, {column}" for row in rows for column in COLUMNS}
    wanted |= {f"{row}, {column}" for row in MTP_TARGETS for column in MTP_COLUMNS}
    assert TABLES.keys() == wanted
