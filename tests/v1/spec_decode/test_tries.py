# SPDX-License-Identifier: Apache-2.0
"""When trial drafts begin, continue and end, and what they cost in total."""

import pytest

from vllm.v1.spec_decode.dynamic.tries import (
    FIRST_BUDGET,
    MOST_SAVED,
    PATIENCE,
    SWITCH_COST,
    FirstDrafts,
)

LOSS, NEEDED, HOPED = 0.4, 0.4, 1.8


def go_on(tries: FirstDrafts, is_new: bool = False, held: int = 1) -> bool:
    return tries.go_on(LOSS, NEEDED, HOPED, is_new, held, elapsed=held)


def begun() -> FirstDrafts:
    tries = FirstDrafts()
    while not go_on(tries):
        pass
    return tries


@pytest.mark.parametrize("held", [1, 16])
def test_useless_tries_cost_their_share_of_time(held: int):
    tries, steps, num_tries = FirstDrafts(), 0, 0
    for _ in range(20_000):
        steps += held
        if go_on(tries, held=held):
            num_tries += 1
            tries.observe(0)
    cost = num_tries * (SWITCH_COST + held * LOSS)
    assert 0.9 * FIRST_BUDGET < cost / steps <= FIRST_BUDGET


def test_try_waits_for_first_drafts_and_continues_while_they_pay():
    tries = begun()
    assert not go_on(tries)
    for accepted in (1, 0, 0, 0):
        tries.observe(accepted)
        assert go_on(tries)
    for _ in range(4):
        tries.observe(0)
    assert not go_on(tries)


def test_try_ends_if_no_draft_is_accepted():
    tries = begun()
    tries.observe(0)
    assert not go_on(tries)
    tries.observe(7)  # after the end of the try
    assert not go_on(tries)


@pytest.mark.parametrize("accepted, part", [(0, 0.0), (2, 0.5)])
def test_accepted_drafts_pay_for_part_of_a_try(accepted: int, part: float):
    """The first step of a try has four requests, which need four accepted drafts."""
    tries, steps = FirstDrafts(at_first=SWITCH_COST + 2.0), 0
    args = {"loss": 2.0, "needed": 1.0, "hoped": 0.0, "held": 1}
    assert tries.go_on(**args, is_new=True)
    for number in range(4):
        tries.observe(number < accepted)
    while not tries.go_on(**args, is_new=True):
        steps += 1
    left = SWITCH_COST + 2.0 - part * 2.0
    assert steps == pytest.approx(left / FIRST_BUDGET, abs=3)


def test_try_ends_if_its_drafts_are_never_verified():
    tries = begun()
    assert not any(go_on(tries) for _ in range(PATIENCE))
    assert any(go_on(tries) for _ in range(round(2 / FIRST_BUDGET)))


def test_saved_time_is_spent_on_new_requests():
    tries = FirstDrafts()
    for _ in range(1000):
        tries.save(1.0)
    tried = 0
    for _ in range(100):
        assert not go_on(tries)
        if go_on(tries, is_new=True):
            tried += 1
            tries.observe(0)
    assert tried == pytest.approx(MOST_SAVED / (SWITCH_COST + LOSS), abs=1)


def test_first_requests_are_tried_if_nothing_is_known():
    """Regression: an engine that had measured step times in a busy second drafted
    nothing for some 1500 steps."""
    tries, at = FirstDrafts(at_first=2 * (SWITCH_COST + LOSS)), []
    for step in range(100):
        if go_on(tries, is_new=not step):
            at.append(step)
            tries.observe(0)
    assert at == [0, 16]


def test_drafts_that_are_known_are_not_tried_at_first():
    tries = FirstDrafts(at_first=10.0)
    tries.observe(0)
    assert not go_on(tries, is_new=True)


def test_tries_follow_soon_after_drafts_have_stopped():
    """Regression: drafts stopped, since those of the first tokens are seldom accepted,
    and were not tried again for hundreds of steps."""
    tries, at = FirstDrafts(), []
    tries.save(0.0)
    for step in range(100):
        if go_on(tries):
            at.append(step)
            tries.observe(0)
    assert at == [7, 23, 55]
    tries.save(1.0)
    assert [go_on(tries) for _ in range(8)] == [False] * 7 + [True]


def test_steps_that_lost_time_leave_no_debt():
    """Regression: after a plan had long been kept that was slightly worse than not
    drafting, new requests were not tried."""
    tries = FirstDrafts()
    for _ in range(1000):
        tries.save(-1.0)
    for _ in range(100):
        tries.save(1.0)
    assert not go_on(tries) and go_on(tries, is_new=True)
