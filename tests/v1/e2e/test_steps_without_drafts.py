# SPDX-License-Identifier: Apache-2.0
"""Drafts that follow steps without drafts are what they would be without those.

They are compared with plain PyTorch, which computes all tokens at once.
"""

import pytest

from .conftest import RunEngine
from .oracle import compare_drafts
from .test_unified_speculator import (
    ENGINES,
    MAX_MODEL_LEN,
    MODES,
    PARALLEL,
    SCENARIOS,
    assert_output_matches_target,
    only_fast,
    oracle_of,
    scenarios,
    speculative,
)

__all__ = ["scenarios"]

# Draft lengths of the steps, in turn.
TURNS = [0] * 9 + [3, 3, 0, 3]
CASES = [f"{mode}-{name}" for mode in MODES for name in ("ahead", "tiny")]
FAST = ("eagle3-ahead", "pard-tiny", "pard2-ahead")


@pytest.mark.parametrize("case", only_fast(CASES, *FAST))
def test_drafts_after_steps_without_drafts(
    case: str, run_engine: RunEngine, models, target, scenarios
):
    mode, name = case.split("-")
    own = {each: scenarios[each] for each in SCENARIOS[name]}
    spec = speculative(models, mode, 3, num_speculative_tokens_per_batch_size="auto")
    result = run_engine(
        own,
        speculative_config=spec,
        max_model_len=MAX_MODEL_LEN,
        made_up_times=True,
        drafts_by_turns=TURNS,
        record_drafts=True,
        idle_every=7,
        **ENGINES[name],
    )
    assert_output_matches_target(result, target, own)
    oracle = oracle_of(mode, models, target)
    width, compared = 3 if mode in PARALLEL else 1, 0
    for each, found in result["scenarios"].items():
        prompts = [request["prompt"] for request in own[each]]
        texts = [p + t for p, t in zip(prompts, found["tokens"], strict=True)]
        compared += compare_drafts(
            found["drafts"], texts, oracle, width, limit=MAX_MODEL_LEN
        )
    assert compared > 40
    assert result["touched_kv"] == 0
