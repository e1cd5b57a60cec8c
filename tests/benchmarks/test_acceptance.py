# SPDX-License-Identifier: Apache-2.0
"""Acceptance lengths that benchmarks assume or expect."""

import pytest

from benchmarks.spec_decode.results import EngineKey
from benchmarks.spec_decode.traces import equal_length, expected_length


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
    assert [chain, tree] == pytest.approx([3.12, 4.09], abs=0.15)
    assert length({8: 1, 3: 2, 0: 1}, "pard", 8, True) == pytest.approx(
        (chain + 2 * small + 1) / 4
    )
    assert length({31: 2, 8: 2}, "pard", 8, True) == pytest.approx((tree + chain) / 2)
    assert length({}, "none", 0) == 1.0
    assert length({}, "pard", 8, True) is None  # unknown what it drafted
    assert length({}, "pard", 8, False, "tiny", 0, True) is None
