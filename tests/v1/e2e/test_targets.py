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
from vllm.lora.request import LoRARequest

from .block_heads import save_block_head
from .hooks import update_weights
from .image_targets import IMAGE_TARGETS, save_image_target
from .images import picture
from .runner import EngineError, Request, Served
from .target_models import (
    TARGETS,
    TOKENS,
    save_adapter,
    save_far_pard2,
    save_head,
    save_pard,
    save_pard2,
    save_target,
)
from .watches import Drafts
from .without_torchvision import register_model

TABLE = Path(__file__).parents[3] / "docs/targets.md"
K, NODES = 4, 12
# Drafter and settings of each column. The draft model is the target itself, in chains
# with probabilistic drafts, so that drafts of sampled requests are right, too.
COLUMNS: dict[str, tuple[str, dict[str, Any]]] = {
    "draft model": ("", {"draft_sample_method": "probabilistic"}),
    "PARD": ("pard", {}),
    "PARD-2": ("pard2", {}),
    "EAGLE-3": ("eagle3", {}),
    "P-EAGLE": ("peagle", {}),
    "DFlash": ("dflash", {}),
    "draft model's trees": ("", {"draft_tree": NODES}),
    "PARD's trees": ("pard", {"draft_tree": NODES}),
    "PARD-2's trees": ("pard2", {"draft_tree": NODES}),
    "EAGLE-3's trees": ("eagle3", {"draft_tree": NODES}),
    "P-EAGLE's trees": ("peagle", {"draft_tree": NODES}),
    "DFlash's trees": ("dflash", {"draft_tree": NODES}),
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
    "PP 2": {"pipeline_parallel_size": 2, "async_scheduling": True},
}
# Engine arguments of targets that take images. SHOWN: images of the requests with these
# prompt lengths, as rows and columns of cells, before the text and within it.
WITH_IMAGES: dict[str, Any] = {
    "skip_tokenizer_init": False,
    "limit_mm_per_prompt": {"image": 2, "video": 0},
}
SHOWN: dict[int, list[tuple[int, int]]] = {20: [(3, 4)], 70: [(2, 3), (4, 4)]}
# Targets for whose layers vLLM has no float32 kernels, on a CPU and on a GPU.
NO_FLOAT32 = dict.fromkeys(("fp8", "GPTQ", "AWQ"), "bfloat16")
ON_CPU = NO_FLOAT32 | {"Qwen3-Next": "bfloat16"}
OTHERS = "DeepSeek-V2", "LoRA", "int8 W8A8"
ON_GPU = NO_FLOAT32 | dict.fromkeys(OTHERS, "bfloat16")
# Targets whose rounding, and so sampled output, depends on the batch: a sixteenth in
# fp8.
ROUNDED_ON_CPU, ROUNDED_ON_GPU = {"fp8"}, ON_GPU.keys()
if torch.cpu._is_amx_tile_supported():  # with its int8 kernel both are true of int8
    ON_CPU["int8 W8A8"] = "bfloat16"
    ROUNDED_ON_CPU.add("int8 W8A8")
ACCEPTED = 0.95  # least share of drafts accepted at each position
# The last step ends with the answer: tokens past it would not count as accepted.
LENGTHS, NUM_TOKENS = (9, 20, 45, 70), 1 + 6 * (K + 1)
BEHIND_BLOCKS = (34, 66, 98)  # all tokens but the last two are loaded
# Log line or error of a cell's content; "yes" has none of them.
SAID = {
    "refused": "do(es)? not support|layers with a state",
    "as PARD": "drafts without the target's hidden states",
    "chains": "Draft trees are not used",
    "one state missing": "PARD-2 drafts without that of its last token",
}
NOT_ON_CPU = "refused on a CPU"
# A chain instead of a tree of fixed size, and adapters applied to all rows of logits.
FAST = ("fp8 KV cache, PARD's trees", "LoRA, EAGLE-3")


def read_table() -> dict[str, str]:
    """Cells of the page's tables, by "target, drafter"."""
    lines = [line for line in TABLE.read_text().splitlines() if line.startswith("| ")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    # Both tables have the same header.
    head = next(row for row in rows if row[0] == "target")
    return {
        f"{row[0]}, {column}": cell
        for row in rows
        if row[0] in (*TARGETS, *IMAGE_TARGETS, *BESIDE)
        for column, cell in zip(head[1:], row[1:], strict=True)
    }


CELLS = read_table()


def engine(name: str, folder: Path, on_cpu: bool) -> dict[str, Any]:
    """Arguments of `vllm_runner` for a target."""
    dtypes = ON_CPU if on_cpu else ON_GPU
    given = ENGINE | {"model": folder, "dtype": dtypes.get(name, "float32")}
    if on_cpu and name == "DeepSeek-V2":
        # MLA takes minutes there, and its block size differs from the drafters'.
        given["env"] = {"VLLM_MLA_DISABLE": "1"}
    if name in IMAGE_TARGETS:
        return given | WITH_IMAGES | {"setup": [partial(register_model, str(folder))]}
    return given | BESIDE.get(name, {})


def prompt(length: int, step: int = 1) -> list[int]:
    """A random prompt that ends with tokens to count on from."""
    rng = random.Random(length)
    first = rng.randrange(TOKENS)
    tail = [(first + step * i) % TOKENS for i in range(8)]
    return [rng.randrange(TOKENS) for _ in range(length - len(tail))] + tail


def greedy_output(length: int, step: int = 1) -> list[int]:
    """The expected greedy output for a prompt."""
    last = prompt(length, step)[-1]
    return [(last + step * i) % TOKENS for i in range(1, NUM_TOKENS + 1)]


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
        "pard": save_pard(folder / "pard"),
        "pard2": save_pard2(folder / "pard2"),
        "eagle3": save_head(folder / "eagle3", is_parallel=False),
        "peagle": save_head(folder / "peagle", is_parallel=True),
        "dflash": save_block_head("dflash", folder / "dflash"),
        # These depend on slots whose KV is loaded.
        "far-pard": save_pard(folder / "far-pard", nearest=3),
        "far-pard2": save_far_pard2(folder / "far-pard2"),
        "single-pard2": save_far_pard2(folder / "single-pard2", heads=1),
        "far-eagle3": save_head(folder / "far-eagle3", is_parallel=False, nearest=4),
        "far-peagle": save_head(folder / "far-peagle", is_parallel=True, nearest=4),
    }


@pytest.fixture(scope="module")
def target_of(folders) -> Callable[[str], Path]:
    """Returns a target's folder, which is created on demand."""

    @cache
    def get(name: str) -> Path:
        folder = folders["targets"] / name
        if name in IMAGE_TARGETS:
            return save_image_target(name, folder)
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


@pytest.mark.parametrize(
    "cell",
    [c if c in FAST else pytest.param(c, marks=pytest.mark.slow) for c in CELLS],
)
def test_table_cell(
    cell: str,
    target_of,
    alone,
    folders,
    vllm_runner,
    on_cpu: bool,
    tmp_path: Path,
):
    name, column = cell.split(", ")
    (drafter, settings), expected = COLUMNS[column], CELLS[cell]
    if on_cpu and name == "DeepSeek-V2" and "draft_tree" in settings:
        pytest.skip("needs a GPU: on a CPU it runs without MLA")
    if expected == "–":
        pytest.skip("the connector does not save the drafter's K/V")
    if expected.endswith(NOT_ON_CPU):
        rest = expected.removesuffix(NOT_ON_CPU).removesuffix(", ") or "yes"
        expected = "refused" if on_cpu else rest
    if name == "PP 2" and expected != "refused" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    folder = target_of(name)
    served = folders["before"] if name == UPDATED else folder
    own = folders.get(drafter, served)
    if name == CONNECTED:
        own = folders.get(f"far-{drafter}", own)
    spec = {"model": str(own), "num_speculative_tokens": K}
    spec |= settings
    if not drafter:
        quantization = BESIDE.get(name, {}).get("quantization")  # as the target is
        spec |= {"method": "draft_model", "quantization": quantization}

    given = engine(name, served, on_cpu) | {"speculative_config": spec}
    if name == CONNECTED:
        given |= connector(tmp_path / "kv")
    if expected == "refused":
        error = rf"ConfigError[\s\S]*({SAID[expected]})"  # before weights load
        with pytest.raises(EngineError, match=error):
            vllm_runner(**given)
        return
    if name == CONNECTED:
        prefill(vllm_runner, given)
    (wanted, wanted_drawn), is_rounded = (
        alone(name),
        name in (ROUNDED_ON_CPU if on_cpu else ROUNDED_ON_GPU),
    )
    with vllm_runner(**given) as llm:
        if name == UPDATED:
            before = llm.generate(requests_of(name, folders, **DRAWN))
            assert before.tokens != wanted_drawn
            llm.call(update_weights, target=str(folder))
        greedy = llm.generate(requests_of(name, folders))
        drawn = llm.generate(requests_of(name, folders, **DRAWN))
        logged = {what for what, words in SAID.items() if words in llm.log}
    assert logged == {what for what in expected.split(", ") if what != "yes"}
    assert greedy.tokens == wanted
    assert drawn.tokens == wanted_drawn or is_rounded
    if name == CONNECTED:
        loaded = greedy.count("external_prefix_cache_hits")
        assert loaded == sum(length - 2 for length in BEHIND_BLOCKS)
    if "as PARD" not in logged:
        assert min(acceptance(greedy)) >= ACCEPTED
    # A draft model ignores adapters and images, and its weights are not updated.
    is_drawn = settings.get("draft_sample_method") == "probabilistic"
    if is_drawn and name not in ("LoRA", UPDATED, *IMAGE_TARGETS):
        assert min(acceptance(drawn)) >= ACCEPTED


def prefill(vllm_runner, given: dict[str, Any]) -> None:
    """Saves the prompts' KV, which the next engine with these arguments loads."""
    with vllm_runner(**given) as llm:
        llm.generate([Request(prompt(length), 1) for length in BEHIND_BLOCKS])


@pytest.mark.slow
def test_one_state_is_missing_after_loaded_kv(
    folders, target_of, vllm_runner, tmp_path
):
    """After KV that was loaded, one slot of PARD-2 lacks the state it should be fed.

    Each draft of this drafter depends on the slot three before its own. Those that
    depend on the first slot that was not loaded may be wrong, all others are right.
    """
    spec = {"model": str(folders["single-pard2"]), "num_speculative_tokens": K}
    given = engine(CONNECTED, target_of(CONNECTED), on_cpu=True)
    given |= connector(tmp_path / "kv") | {"speculative_config": spec}
    prefill(vllm_runner, given)
    with vllm_runner(**given) as llm:
        llm.watch(Drafts)
        loaded = llm.generate(requests_of(CONNECTED, folders))
    wrong = set()
    for number, known, drafts in loaded.drafts:
        length = BEHIND_BLOCKS[number]
        for position, draft in enumerate(drafts, known):
            if draft != (prompt(length)[-1] + position - length + 1) % TOKENS:
                # The slot that it depends on, relative to the first one not loaded.
                wrong.add(position - 1 - 3 - (length - 2))
    assert wrong == {0}


def test_table_is_complete():
    rows = (*TARGETS, *IMAGE_TARGETS, *BESIDE)
    wanted = {f"{name}, {column}" for name in rows for column in COLUMNS}
    assert CELLS.keys() == wanted
