# SPDX-License-Identifier: Apache-2.0
"""The layout's numbers, compared with vLLM's and with the table in its docstring."""

from types import SimpleNamespace

import pytest

from vllm.config import SpeculativeConfig, VllmConfig
from vllm.config.drafter import DrafterConfig
from vllm.v1.worker.gpu.spec_decode.unified.layout import DraftLayout, draft_plans

METHODS = {0: "draft_model", 1: "eagle3"}
K = [1, 2, 3, 5, 7, 8, 15]


def engine_config(drafts: int, shift: int, parallel: bool) -> SimpleNamespace:
    """The config attributes that vLLM's properties read."""
    method = METHODS[shift]
    spec = SimpleNamespace(
        drafter=DrafterConfig(method, drafts),
        num_speculative_tokens=drafts,
        parallel_drafting=parallel,
        use_dflash=lambda: False,
        use_dspark=lambda: False,
        uses_draft_model=lambda: method == "draft_model",
        use_eagle=lambda: method == "eagle3",
    )
    return SimpleNamespace(speculative_config=spec, num_speculative_tokens=drafts)


@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("drafts", K)
def test_extra_slots_match_vllm(drafts: int, shift: int, parallel: bool):
    layout = DraftLayout(drafts, shift, drafts if parallel else 1)
    config = engine_config(drafts, shift, parallel)
    extra = SpeculativeConfig.max_num_new_slots_for_drafting.fget
    assert layout.num_extra_slots == extra(config.speculative_config)


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("drafts", K)
def test_vllm_reserves_all_written_positions(drafts: int, shift: int):
    """Past the target's tokens: the next token of a draft model, and all drafts but the
    last, of which there are as many as beams at each depth."""
    config = engine_config(drafts, shift, parallel=False)
    config.speculative_config.drafter = drafter = DrafterConfig(
        "eagle3" if shift else "draft_model", drafts, num_nodes=31, is_unified=True
    )
    written = (drafts - 1) * drafter.num_beams + 1 - shift
    assert drafter.num_beams == 4 and drafter.num_lookahead_tokens >= written
    assert VllmConfig.num_lookahead_tokens.fget(config) == drafter.num_lookahead_tokens
    for width in range(1, drafts + 1):
        reserved = engine_config(drafts, shift, width > 1)
        assert drafts - shift <= VllmConfig.num_lookahead_tokens.fget(reserved)


@pytest.mark.parametrize(
    "most, width, drafts, samples",
    [
        (8, 4, 8, [4, 4]),
        (7, 4, 7, [4, 3]),
        (5, 5, 5, [5]),
        (3, 1, 3, [1, 1, 1]),
        (8, 4, 5, [4, 1]),
        (8, 4, 0, [0]),
    ],
)
def test_samples_of_passes(most: int, width: int, drafts: int, samples: list[int]):
    (plan,) = draft_plans(DraftLayout(most, 0, width), {drafts: drafts}).values()
    passes = range(plan.layout.num_passes)
    assert [plan.num_samples(draft_pass) for draft_pass in passes] == samples
