# SPDX-License-Identifier: Apache-2.0
"""What a round of requests comes to: its steady part, and the acceptance expected."""

import pytest

from benchmarks.spec_decode.results import EngineKey
from benchmarks.spec_decode.traces import equal_length, expected_length
from benchmarks.spec_decode.worker import Step, steady_part, summary

ROUND = [
    Step(0.0, {"a": 1}, False),  # b is still being prefilled
    Step(5.0, {"a": 3, "b": 1}, False),
    Step(6.0, {"a": 3, "b": 2}, False),
    Step(7.0, {"a": 1, "b": 2}, False),
    Step(8.0, {"a": 3, "b": 3}, False),
    Step(9.5, {"a": 1, "b": 3}, False),
    Step(99.0, {"a": 1, "b": 3}, True),
    Step(100.0, {"b": 3}, True),
]


def test_steady_part_excludes_prefill_and_tail():
    steady = steady_part(ROUND, 2)
    assert [step.time for step in steady] == [6.0, 7.0, 8.0, 9.5]
    assert summary(steady, 2) == {
        "step_s": 1.0,
        "mean_step_s": pytest.approx(3.5 / 3),
        "tokens_per_step": pytest.approx((3 + 6 + 4) / 3 / 2),
        "steady_steps": 3,
    }
    assert steady_part(ROUND[:4], 2) == steady_part(ROUND, 3) == []
    assert set(summary([], 2).values()) == {None, 0}


@pytest.mark.parametrize(
    ("k", "length"), [(0, 1.0), (3, 2.5), (5, 3.0), (7, 3.5), (11, 4.0), (15, 4.5)]
)
def test_equal_length_matches_readme(k: int, length: float):
    assert equal_length(k) == pytest.approx(length)
    assert expected_length("equal", EngineKey("ours", "draft", k), {}) == length
    if k:  # vLLM's synthetic acceptance has that length
        from vllm.config import SpeculativeConfig

        rates = SpeculativeConfig._resolve_synthetic_acceptance_rates(k, None, length)
        assert 1 + sum(rates) == pytest.approx(length)


def test_expected_length_of_drafted_tokens():
    def length(drafted: dict[int, int], mode: str, k: int, *more) -> float | None:
        return expected_length(
            "recorded-t0.5", EngineKey("ours", mode, k, *more), drafted
        )

    chain, small = length({}, "pard", 8), length({}, "pard", 3)
    tree = length({}, "pard2", 8, False, "llama-3.1-8b", 31)
    assert [chain, tree] == pytest.approx([2.40, 3.28], abs=0.02)
    assert length({8: 1, 3: 2, 0: 1}, "pard", 8, True) == pytest.approx(
        (chain + 2 * small + 1) / 4
    )
    assert length({31: 2, 8: 2}, "pard", 8, True) == pytest.approx((tree + chain) / 2)
    assert length({}, "none", 0) == 1.0
    assert length({}, "pard", 8, True) is None  # unknown what it drafted
