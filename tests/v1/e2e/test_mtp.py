# SPDX-License-Identifier: Apache-2.0
"""MTP modules in the unified speculator: chains, those of vLLM's own, and trees."""

import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from vllm.config.drafter import resolve

from .hooks import drafter_name
from .mtp_targets import MTP_TARGETS, save_mtp_target
from .runner import Request
from .target_models import TOKENS
from .test_targets import (
    ACCEPTED,
    DRAWN,
    ENGINE,
    LENGTHS,
    NODES,
    SAID,
    TABLE,
    K,
    acceptance,
    greedy_output,
    requests_of,
)
from .watches import Drafts

COLUMNS: dict[str, dict[str, Any]] = {
    "chains": {"num_speculative_tokens": K},
    "trees": {"num_speculative_tokens": K, "draft_tree": NODES},
}
FAST = ("MiMo-trees",)


def read_table() -> dict[str, str]:
    """Cells of the page's table, by "target-column"."""
    lines = TABLE.read_text().splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    head = next(row for row in rows if row[0] == "MTP module")
    return {
        "-".join((row[0].removesuffix("'s"), column)): cell
        for row in rows[rows.index(head) + 2 :][: len(MTP_TARGETS)]
        for column, cell in zip(head[1:], row[1:], strict=True)
    }


CELLS = read_table()


def engine(name: str, folder: Path, on_cpu: bool) -> dict[str, Any]:
    is_mimo = name == "MiMo"
    # As in `test_targets.py`: no float32 kernels, and no MLA on a CPU.
    dtype = "float32" if is_mimo or (on_cpu and name == "DeepSeek-V3") else "bfloat16"
    env = {} if is_mimo or not on_cpu else {"VLLM_MLA_DISABLE": "1"}
    return ENGINE | {"model": folder, "dtype": dtype, "env": env}


@pytest.fixture(scope="module")
def target_of(tmp_path_factory) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("mtp")
    return cache(lambda name: save_mtp_target(name, folder / name))


def leave_to_vllm() -> None:
    resolve.MTP_MODULES = ()


@pytest.mark.parametrize(
    "cell", [c if c in FAST else pytest.param(c, marks=pytest.mark.slow) for c in CELLS]
)
def test_output_matches_target(cell: str, target_of, vllm_runner, on_cpu: bool):
    name, column = cell.rsplit("-", 1)
    given = engine(name, target_of(name), on_cpu)
    with vllm_runner(**given) as llm:
        wanted = llm.generate(requests_of(name, {}, **DRAWN)).tokens
    given["speculative_config"] = {"method": "mtp"} | COLUMNS[column]
    with vllm_runner(**given) as llm:
        assert llm.call(drafter_name) == "EagleDrafter"
        greedy = llm.generate(requests_of(name, {}))
        drawn = llm.generate(requests_of(name, {}, **DRAWN))
        is_chain = SAID["chains"] in llm.log
    if not (on_cpu and name == "DeepSeek-V3"):  # which has no MLA there
        assert is_chain == (CELLS[cell] == "chains")
    assert greedy.tokens == [greedy_output(length) for length in LENGTHS]
    assert min(acceptance(greedy)) >= ACCEPTED
    assert drawn.tokens == wanted
    if column == "trees" and not is_chain:
        assert "Each pass of a draft tree continues one node" not in llm.log
        assert sum(drawn.counters["num_accepted_tree_nodes"][1:]) > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", MTP_TARGETS)
def test_chains_are_those_of_vllm(name: str, target_of, vllm_runner, on_cpu: bool):
    rng, drafts = random.Random(name), []
    texts = [[rng.randrange(TOKENS) for _ in range(9 + 7 * i)] for i in range(4)]
    given = engine(name, target_of(name), on_cpu)
    given["speculative_config"] = {"method": "mtp", "num_speculative_tokens": K}
    given["env"] = given["env"] | {"VLLM_USE_V2_MODEL_RUNNER": "1"}
    for setup, drafter in (([], "EagleDrafter"), ([leave_to_vllm], "MTPSpeculator")):
        with vllm_runner(**given, setup=setup) as llm:
            assert llm.call(drafter_name) == drafter
            llm.watch(Drafts)
            served = llm.generate([Request(text, 24) for text in texts])
        drafts.append(sorted(served.drafts))
    assert drafts[0] == drafts[1]


@pytest.mark.slow
@pytest.mark.parametrize("is_fp8", [False, True])
def test_drafting_within_a_window(is_fp8: bool, target_of, vllm_runner):
    """As long as it pays, or in fp8, which needs bfloat16."""
    settings: dict[str, Any] = {"method": "mtp", "draft_window": 64}
    if is_fp8:
        settings |= {"quantization": "fp8_per_channel", "num_speculative_tokens": K}
        settings["draft_lm_head_quantization"] = "fp8"
    dtype = "bfloat16" if is_fp8 else "float32"
    given = ENGINE | {"model": target_of("MiMo"), "dtype": dtype}
    with vllm_runner(**given, speculative_config=settings) as llm:
        served = llm.generate(requests_of("MiMo", {}))
        assert ("a fp8 copy of the lm_head" in llm.log) == is_fp8
        found = llm.call(weight_dtype)
    assert found == ("torch.float8_e4m3fn" if is_fp8 else "torch.float32")
    assert served.tokens == [greedy_output(length) for length in LENGTHS]
    drafted, accepted = map(served.count, ("num_draft_tokens", "num_accepted_tokens"))
    assert accepted > 0.8 * drafted > 0  # the last steps draft more than is asked for


def weight_dtype(made: Any) -> str:
    """Of the module's first projection."""
    (layer,) = made.speculator.model.model.mtp_layers.values()
    return str(layer.mtp_block.self_attn.qkv_proj.weight.dtype)
