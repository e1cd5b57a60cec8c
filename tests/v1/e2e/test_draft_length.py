# SPDX-License-Identifier: Apache-2.0
"""Output equals the target's while the draft length changes from step to step."""

from typing import Any

import pytest

from .conftest import RunEngine
from .oracle import assert_greedy_output_matches
from .other_drafters import SIZE, save_counting_model, save_random_dflash
from .test_unified_speculator import (
    MODES,
    assert_output_matches_target,
    only_fast,
    speculative,
)

# Batches of 8 shrink to 1, with sizes in between that draft nothing.
SCHEDULE = [[1, 2, 3], [3, 4, 0], [5, 8, 7]]
ENGINE = {"max_num_seqs": 8, "max_num_batched_tokens": 256, "max_model_len": 320}


@pytest.fixture(scope="module")
def scenarios(make_prompt) -> dict[str, list[dict[str, Any]]]:
    shrinking = [
        {"prompt": make_prompt(24 + 9 * i, 70 + i), "max_tokens": 8 + 8 * i}
        for i in range(8)
    ]
    return {"shrinking": shrinking, "alone": shrinking[-1:]}


def run(
    run_engine, models, mode, scenarios, drafts, schedule, **how: Any
) -> dict[str, Any]:
    changing = {"num_speculative_tokens_per_batch_size": schedule}
    spec = speculative(models, mode, drafts, **changing)
    return run_engine(scenarios, speculative_config=spec, **ENGINE, **how)


@pytest.mark.parametrize("mode", only_fast(MODES, "pard", "eagle3"))
def test_schedule(mode: str, run_engine: RunEngine, models, target, scenarios):
    """Each length has its own graphs, and some batches are smaller than their graph."""
    result = run(run_engine, models, mode, scenarios, 7, SCHEDULE, record_graphs=True)
    assert_output_matches_target(result, target, scenarios)
    assert result["replays"]["first"] > 0
    assert (result["replays"]["later"] > 0) == (mode in ("draft", "eagle3"))
    assert not result["timed_requests"]
    alone = result["scenarios"]["alone"]["counters"]
    assert 0 < alone["num_draft_tokens"][0] <= 3 * alone["num_drafts"][0]
    found = result["scenarios"]["shrinking"]["counters"]
    # Some steps of 8 to 5 requests drafted all 7, those of 2 and 1 only 3.
    drafts, tokens = found["num_drafts"][0], found["num_draft_tokens"][0]
    assert 3 * drafts < tokens < 7 * drafts
    assert alone["num_steps"][7] == 0 < found["num_steps"][7]


@pytest.mark.parametrize("mode", only_fast(("eagle3", "pard"), "pard"))
def test_auto(mode: str, run_engine: RunEngine, models, target, scenarios):
    result = run(run_engine, models, mode, scenarios, 3, "auto")
    assert_output_matches_target(result, target, scenarios)
    # One request, and at least one larger batch, depending on the machine's speed.
    assert result["timed_requests"][0] == 1 and len(result["timed_requests"]) > 1
    assert result["scenarios"]["shrinking"]["counters"]["num_drafts"][0] > 0


@pytest.mark.parametrize("schedule", [None, "auto"])
@pytest.mark.parametrize("mode", only_fast(("eagle3", "pard"), "pard"))
def test_requests_that_refuse_drafts(
    mode: str, schedule, run_engine: RunEngine, models, target, scenarios
):
    """Alone, and in batches with others, which keep their drafts and graphs."""
    refuses = {"sampling": {"extra_args": {"disable_spec_decode": True}}}
    asked = {
        "shrinking": [
            one | (refuses if i % 2 else {})
            for i, one in enumerate(scenarios["shrinking"])
        ],
        "alone": [scenarios["alone"][0] | refuses],
    }
    is_fixed = schedule is None
    how = {"record_graphs": is_fixed}
    result = run(run_engine, models, mode, asked, 3, schedule, **how)
    assert_output_matches_target(result, target, scenarios)
    found = {name: each["counters"] for name, each in result["scenarios"].items()}
    assert found["alone"]["num_drafts"][0] == 0
    if is_fixed:
        assert found["shrinking"]["num_accepted_tokens"][0] > 0
        assert result["replays"]["first"] > 0
    else:  # no step with the longest drafts, as no request could use them
        assert found["alone"]["num_steps"][3] == 0


@pytest.fixture(scope="module")
def run_mtp(run_engine: RunEngine, tmp_path_factory):
    """Runs requests with a model whose MTP layer drafts right, or wrong, tokens."""
    asked = [
        {"prompt": [(31 * i + 17 * n) % SIZE for n in range(9 + i)], "max_tokens": 60}
        for i in range(6)
    ]

    def run(drafts_right: bool, **how: Any) -> dict[str, Any]:
        folder = tmp_path_factory.mktemp("mtp") / "model"
        model = save_counting_model(folder, drafts_right)
        how |= {"model": model, "skip_tokenizer_init": True}
        return run_engine({"all": asked}, **how, **ENGINE)

    return run


@pytest.fixture(scope="module")
def without_drafts(run_mtp) -> list[list[int]]:
    return run_mtp(True)["scenarios"]["all"]["tokens"]


@pytest.mark.parametrize(
    "drafts_right", [False, pytest.param(True, marks=pytest.mark.slow)]
)
def test_auto_with_mtp(drafts_right: bool, run_mtp, without_drafts):
    """vLLM's own speculator skips passes if they do not pay."""
    spec = {
        "method": "mtp",
        "num_speculative_tokens": 3,
        "num_speculative_tokens_per_batch_size": "auto",
    }
    how = {"made_up_times": True, "record_drafts": True}
    result = run_mtp(drafts_right, speculative_config=spec, **how)
    assert result["drafter"] == "MTPSpeculator"
    assert result["timed_requests"][0] == 1 and len(result["timed_requests"]) > 1
    found = result["scenarios"]["all"]
    assert found["tokens"] == without_drafts
    drafts, accepted = (
        found["counters"][name][0] for name in ("num_drafts", "num_accepted_tokens")
    )
    lengths = [len(tokens) for _, _, tokens in found["drafts"]]
    if drafts_right:
        assert accepted > drafts
        assert set(lengths[-20:]) == {3}
    else:
        assert lengths[0] > 0 and accepted < drafts / 10
        # One entry per request and step with drafts: some steps at first, then none.
        assert len(lengths) < 6 * 60 / 3


@pytest.mark.slow
@pytest.mark.parametrize(
    "method, drafter", [("dflash", "DFlashSpeculator"), ("ngram", "NgramGPUSpeculator")]
)
def test_auto_with_methods_that_always_draft_all(
    method: str, drafter: str, run_engine, models, tmp_path, target, scenarios, on_cpu
):
    """Only drafts that pay are verified: next to none with a random drafter."""
    if method == "ngram" and on_cpu:
        pytest.skip("vLLM's n-gram drafts need a backend of Triton's own.")
    spec = {
        "method": method,
        "num_speculative_tokens": 3,
        "num_speculative_tokens_per_batch_size": "auto",
    }
    if method == "dflash":
        spec["model"] = str(save_random_dflash(models / "target", tmp_path / "drafter"))
    else:
        spec["prompt_lookup_max"] = 2
    how = {"made_up_times": True, "record_drafts": True}
    result = run_engine(scenarios, speculative_config=spec, **how, **ENGINE)
    assert result["drafter"] == drafter
    for name, found in result["scenarios"].items():
        prompts = [request["prompt"] for request in scenarios[name]]
        assert_greedy_output_matches(target, prompts, found["tokens"])
    verified = result["scenarios"]["shrinking"]["counters"]["num_drafts"][0]
    assert verified > 0
    if method == "dflash":
        assert verified < sum(one["max_tokens"] for one in scenarios["shrinking"]) / 3
