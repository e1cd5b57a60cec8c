# SPDX-License-Identifier: Apache-2.0
"""`num_speculative_tokens_per_batch_size="auto"` in the config."""

import pickle
from contextlib import nullcontext
from copy import copy
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from vllm.config.drafter import DrafterConfig, engine
from vllm.config.drafter.engine import check_others_choose, settle_auto
from vllm.config.drafter.length import (
    TREES,
    AutoSchedule,
    candidate_lengths,
    check_auto,
    choose_by_default,
    chosen_lengths,
    covering_lookup,
    is_auto,
    lengths_vary,
    trims,
)
from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup

from .specs import unresolved


@pytest.mark.parametrize(
    "depth, nodes, lengths",
    [
        (1, None, [0, 1]),
        (6, None, [0, 1, 2, 3, 4, 5, 6]),
        (15, None, [0, 1, 2, 3, 4, 5, 7, 9, 12, 15]),
        # Trees are candidates beyond the longest chain.
        (7, 7, [0, 1, 2, 3, 4, 5, 7]),
        (7, 20, [0, 1, 2, 3, 4, 5, 7, 11, 15, 20]),
        (7, 63, [0, 1, 2, 3, 4, 5, 7, 11, 15, 23, 31, 47, 63]),
    ],
)
def test_candidates(depth: int, nodes: int | None, lengths: list[int]):
    assert candidate_lengths(depth, nodes) == lengths


@pytest.mark.parametrize("max_batch_size", [1, 2, 5, 8, 256])
def test_lookup_for_graphs_names_every_candidate(max_batch_size: int):
    lookup = build_dynamic_sd_schedule_lookup("auto", max_batch_size, 7)
    assert lookup == covering_lookup(max_batch_size, 7)
    assert set(lookup[1:]) == set(candidate_lengths(7))
    assert len(lookup) > max_batch_size
    if max_batch_size == 256:  # graphs of a length reach to the last batch that has it
        assert lookup[-7:] == candidate_lengths(7)


def test_a_schedule_is_still_the_bases():
    schedule = [(1, 2, 3), (3, 4, 0)]
    spec = settings(method="medusa", num_speculative_tokens_per_batch_size=schedule)
    assert not is_auto(spec)
    check_auto(spec)  # of "auto" alone
    assert build_dynamic_sd_schedule_lookup(schedule, 5, 3) == [0, 3, 3, 0, 0, 0]
    with pytest.raises(ValueError):
        build_dynamic_sd_schedule_lookup("automatic", 5, 3)


def parallel(**changes) -> dict[str, Any]:
    values = {
        "data_parallel_size": 1,
        "enable_elastic_ep": False,
        "pipeline_parallel_size": 1,
        "distributed_executor_backend": None,
    }
    return {"target_parallel_config": SimpleNamespace(**values | changes)}


MODULES = SimpleNamespace(hf_config=SimpleNamespace(num_nextn_predict_layers=3))
settings = partial(
    unresolved,
    "a/head",
    method="eagle3",
    num_speculative_tokens=7,
    num_speculative_tokens_per_batch_size="auto",
)


@pytest.mark.parametrize(
    "given, refusal, stays_default",
    [
        ({}, None, True),
        (parallel(data_parallel_size=2), None, True),
        # Several steps at once: only if it was asked for.
        (parallel(pipeline_parallel_size=2), None, False),
        (
            parallel(data_parallel_size=2, enable_elastic_ep=True),
            "enable_elastic_ep",
            False,
        ),
        (
            parallel(distributed_executor_backend="external_launcher"),
            "choose by its own clock",
            False,
        ),
        ({"method": "medusa"}, "method medusa: give num_spec", False),
        (
            {"method": "mtp", "draft_model_config": MODULES},
            "method mtp of several modules",
            False,
        ),
    ],
)
def test_what_it_does_not_support_is_refused_and_a_default_fixed(
    given: dict, refusal: str | None, stays_default: bool, caplog_vllm
):
    spec = settings(**given)
    with pytest.raises(ValueError, match=refusal) if refusal else nullcontext():
        check_auto(spec)
    assert is_auto(spec)
    spec.is_auto_by_default = True
    with caplog_vllm.at_level("INFO", logger="vllm"):
        check_auto(spec)
    assert is_auto(spec) is stays_default
    lines = [] if stays_default else ["Every draft has 7 tokens: "]
    assert [said[:26] for said in caplog_vllm.messages] == lines


@pytest.mark.parametrize(
    "unsupported, is_v2, watermark",
    [
        (None, True, None),
        (None, False, None),
        ("a draft model with M-RoPE", True, None),
        (None, True, "some"),
    ],
)
def test_a_default_needs_the_unified_speculator(unsupported, is_v2, watermark):
    drafter = DrafterConfig("draft_model", 7, unsupported=unsupported)
    config = SimpleNamespace(use_v2_model_runner=is_v2, watermark_config=watermark)
    runs = unsupported is None and is_v2 and watermark is None

    def settle(**given: Any) -> bool:
        config.speculative_config = settings(drafter=drafter, **given)
        settled = settle_auto(config)
        assert settled == is_auto(config.speculative_config)
        return settled

    assert settle(is_auto_by_default=True) == runs
    assert settle()  # where it was asked for another check refuses it
    trimmed = {"enable_adaptive_verification": True}
    assert settle(num_speculative_tokens_per_batch_size=None, **trimmed) == runs
    config.speculative_config = None
    assert not settle_auto(config)


OTHER = DrafterConfig("mtp", 3, unsupported="method mtp")


@pytest.mark.parametrize("method", ["mtp", "dflash", "dspark", "ngram", "eagle3"])
def test_others_choose_if_asked_to(method: str):
    """One-pass drafters among them: only the unified speculator's draft trees."""
    drafter = replace(OTHER, method=method, is_parallel=True, parallel_width=3)
    spec = settings(method=method, drafter=drafter)
    check_auto(spec)
    config = SimpleNamespace(speculative_config=spec, use_v2_model_runner=True)
    assert settle_auto(config)
    assert chosen_lengths(spec) == [0, 1, 2, 3]
    check_others_choose(config, drafter)


@pytest.mark.parametrize(
    "changes, is_v2, is_adaptive, why",
    [
        ({}, False, False, "Model Runner V1"),
        ({}, True, True, "enable_adaptive_verification"),
        ({"method": "eagle3", "unsupported": "watermarks"}, False, False, "watermarks"),
        ({"is_unified": True}, True, True, None),
    ],
)
def test_others_choose_where_steps_are_timed_and_nothing_else_does(
    changes: dict, is_v2: bool, is_adaptive: bool, why: str | None
):
    spec = settings(enable_adaptive_verification=is_adaptive)
    config = SimpleNamespace(speculative_config=spec, use_v2_model_runner=is_v2)
    refusal = f'"auto" does not support {why}.*: turn that'
    with pytest.raises(ValueError, match=refusal) if why else nullcontext():
        check_others_choose(config, replace(OTHER, **changes))


def test_auto_keeps_what_it_chooses_between():
    schedule = AutoSchedule([0, 3, 7, 15])
    for same in (schedule, copy(schedule), pickle.loads(pickle.dumps(schedule))):
        assert same == "auto"
        assert same.lengths == (0, 3, 7, 15)
    assert set(covering_lookup(64, 15, schedule)[1:]) == {0, 3, 7, 15}
    lookup = build_dynamic_sd_schedule_lookup(schedule, 64, 15)
    assert set(lookup[1:]) == {0, 3, 7, 15}


# Adaptive verification.


@pytest.fixture
def on_a_gpu(monkeypatch) -> None:
    platform = SimpleNamespace(is_cpu=lambda: False)
    monkeypatch.setattr(engine, "current_platform", platform)


@pytest.mark.parametrize("schedule", [None, "auto"])
@pytest.mark.parametrize("method", ["draft_model", "eagle3"])
def test_verifying_a_part_is_the_engines_choice_like_a_length(
    method: str, schedule, on_a_gpu
):
    """Beside trees. A number set by the user keeps its meaning."""
    drafter = DrafterConfig(method, 7, parallel_width=7, is_parallel=True)
    spec = settings(
        method=method,
        drafter=drafter,
        num_speculative_tokens_per_batch_size=schedule,
        enable_adaptive_verification=True,
    )
    config = SimpleNamespace(
        speculative_config=spec,
        use_v2_model_runner=True,
        parallel_config=SimpleNamespace(data_parallel_size=1),
    )
    for _ in range(2):  # settled again, it stays
        assert settle_auto(config)
        expected = [7] if schedule is None else candidate_lengths(7, max(TREES))
        assert chosen_lengths(spec) == expected
        assert lengths_vary(spec) == (schedule is not None)
    assert not trims(spec)  # not before the unified speculator is known to draft
    spec.drafter = replace(drafter, is_unified=True)
    assert trims(spec)


def test_nobody_is_given_it_unasked():
    spec = unresolved("a/head", method="eagle3", num_speculative_tokens=None)
    choose_by_default(spec)
    assert spec.is_auto_by_default and not spec.enable_adaptive_verification
