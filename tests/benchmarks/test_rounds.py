# SPDX-License-Identifier: Apache-2.0
"""What a log of steps tells."""

import pytest

from benchmarks.spec_decode.rounds import (
    Step,
    conditional_rates,
    expected_tokens_per_s,
    find_steady,
    mean_length,
    minimum_variance_rates,
    seconds_to_first_tokens,
    time_per_output_token,
)


def steps_of(*rows: tuple[float, dict[str, int], bool]) -> list[Step]:
    return [Step(*row) for row in rows]


ROUND = steps_of(
    (0.0, {"a": 1}, False),  # b is still being prefilled
    (5.0, {"a": 3, "b": 1}, False),
    (6.0, {"a": 3, "b": 2}, False),
    (7.0, {"a": 1, "b": 2}, False),
    (8.0, {"a": 3, "b": 3}, False),
    (9.5, {"a": 1, "b": 3}, False),
    (99.0, {"a": 1, "b": 3}, True),
    (100.0, {"b": 3}, True),
)


def test_steady_part_leaves_out_prefill_and_tail():
    steady = find_steady(ROUND, 2)
    assert (steady.begin, steady.end, steady.num_steps) == (6.0, 9.5, 3)
    assert steady.step_s == 1.0
    assert steady.mean_step_s == pytest.approx(3.5 / 3)
    assert steady.tokens_per_step == pytest.approx((3 + 6 + 4) / 3 / 2)


def test_prefill_ends_with_the_last_first_token():
    assert seconds_to_first_tokens(ROUND, -1.0, 2) == 6.0
    assert seconds_to_first_tokens(ROUND, -1.0, 3) is None


def test_no_steady_part():
    assert find_steady(ROUND[:4], 2) is None
    assert find_steady(ROUND, 3) is None


def test_time_per_output_token():
    steps = steps_of((1.0, {"a": 2}, False), (2.0, {"a": 1}, False), (4.0, {"a": 2}, 1))
    assert time_per_output_token(steps) == pytest.approx(1.0)
    assert time_per_output_token(steps[:1]) is None


@pytest.mark.parametrize("length", [1.0, 2.5, 3.0, 3.7, 8.0])
def test_rates_give_the_acceptance_length(length: float):
    assert mean_length(minimum_variance_rates(length, 7)) == pytest.approx(length)


def test_rates_of_a_curve():
    rates = conditional_rates([0.8, 0.4, 0.4])
    assert rates == pytest.approx([0.8, 0.5, 1.0])
    assert mean_length(rates) == pytest.approx(1 + 0.8 + 0.4 + 0.4)


def test_speed_at_the_mean_acceptance():
    rates = [0.5, 1.0]
    found = {"mean_step_s": 0.1, "drafted": {}}
    assert expected_tokens_per_s(4, rates, found) == pytest.approx(4 * 2.0 / 0.1)
    found["drafted"] = {"2": 3, "1": 1}
    assert expected_tokens_per_s(4, rates, found) == pytest.approx(4 * 7.5 / 4 / 0.1)
    assert expected_tokens_per_s(4, rates, {"mean_step_s": None}) is None


def test_too_long_an_acceptance():
    with pytest.raises(ValueError, match="3 are drafted"):
        minimum_variance_rates(4.5, 3)


def test_rates_are_the_bases():
    """An engine starts with vLLM's own rates; setting them again changes none."""
    from vllm.config import SpeculativeConfig
    from vllm.v1.spec_decode.utils import unconditional_to_conditional_rates

    for length in (1.0, 2.5, 3.0, 3.7, 8.0):
        base = SpeculativeConfig._resolve_synthetic_acceptance_rates(7, None, length)
        conditional = unconditional_to_conditional_rates(base)
        assert minimum_variance_rates(length, 7) == pytest.approx(conditional)
