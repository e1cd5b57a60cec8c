# SPDX-License-Identifier: Apache-2.0
"""When trials begin, go on and end, and what they cost in total."""

import pytest

from vllm.v1.spec_decode.auto.explore import (
    BUDGET,
    FIRST_WAIT,
    MOST_CREDIT,
    PATIENCE,
    SWITCH_COST,
    Explorer,
)

PLAN, LOSS, NEEDED, HOPED = 3, 0.4, 0.4, 1.8


def spent() -> Explorer:
    """Without the credit that is there at first."""
    explorer = Explorer()
    explorer.elapse(1, saved=-1e9)
    return explorer


def step(explorer: Explorer, is_new: bool = False, elapsed: int = 1) -> bool:
    """Whether a step drafts, where nothing is drafted but in trials."""
    explorer.elapse(elapsed, saved=None)
    plan = explorer.go_on(elapsed)
    if plan is not None:
        return plan > 0
    return explorer.begin_drafting(PLAN, LOSS * elapsed, NEEDED, HOPED, is_new)


def begun() -> Explorer:
    explorer = spent()
    while not step(explorer):
        pass
    return explorer


@pytest.mark.parametrize("elapsed", [1, 16])
def test_useless_trials_cost_their_share_of_time(elapsed: int):
    explorer, steps, trials = spent(), 0, 0
    for _ in range(20_000):
        steps += elapsed
        if step(explorer, elapsed=elapsed):
            trials += 1
            explorer.observe(0)
    cost = trials * (SWITCH_COST + elapsed * LOSS)
    assert 0.9 * BUDGET < cost / steps <= BUDGET


def test_trial_waits_for_first_drafts_and_goes_on_while_they_pay():
    explorer = begun()
    assert not step(explorer)
    for accepted in (1, 0, 0, 0):
        explorer.observe(accepted)
        assert step(explorer)
    for _ in range(4):
        explorer.observe(0)
    assert not step(explorer)


def test_trial_ends_if_no_draft_is_accepted():
    explorer = begun()
    explorer.observe(0)
    assert not step(explorer)
    explorer.observe(7)  # after its end
    assert not step(explorer)


def test_trial_ends_if_its_drafts_are_never_verified():
    explorer = begun()
    assert not any(step(explorer) for _ in range(PATIENCE))
    assert any(step(explorer) for _ in range(round(2 / BUDGET)))


@pytest.mark.parametrize("accepted, part", [(0, 0.0), (2, 0.5)])
def test_accepted_drafts_pay_for_part_of_a_trial(accepted: int, part: float):
    """Its first step has four requests, which need four accepted drafts."""
    explorer, steps = spent(), 0
    args = PLAN, 2.0, 1.0, 0.0, True

    def wait() -> int:
        steps = 0
        while explorer.go_on(1) is None and not explorer.begin_drafting(*args):
            explorer.elapse(1, None)
            steps += 1
        return steps

    wait()
    for number in range(4):
        explorer.observe(number < accepted)
    steps = wait()
    assert steps == pytest.approx((SWITCH_COST + 2 - 2 * part) / BUDGET, abs=3)


def test_saved_time_is_spent_on_new_requests():
    explorer = spent()
    for _ in range(1000):
        explorer.elapse(1, saved=1.0)
    tried = 0
    for _ in range(100):
        if step(explorer, is_new=True):
            tried += 1
            explorer.observe(0)
    spendable = MOST_CREDIT + BUDGET * 1100
    assert tried == pytest.approx(spendable / (SWITCH_COST + LOSS), abs=1)


def test_trials_follow_soon_after_drafts_have_stopped():
    """Regression: drafts stopped, since those of the first tokens are seldom accepted,
    and were not tried again for hundreds of steps."""
    explorer, at = Explorer(), []
    explorer.elapse(1, saved=1.0)
    for number in range(100):
        if step(explorer):
            at.append(number)
            explorer.observe(0)
    waits = [FIRST_WAIT, 3 * FIRST_WAIT, 7 * FIRST_WAIT]
    assert at == [wait - 1 for wait in waits]


def test_steps_that_lost_time_leave_no_debt():
    """Regression: after a plan had long been kept that was slightly worse than not
    drafting, new requests were not tried."""
    explorer = Explorer()
    for _ in range(1000):
        explorer.elapse(1, saved=-1.0)
    for _ in range(100):
        explorer.elapse(1, saved=1.0)
    assert step(explorer, is_new=True)


def test_other_trials_run_all_their_steps_within_the_budget():
    explorer, plans = spent(), []
    for _ in range(4000):
        explorer.elapse(1, saved=1.0)
        plan = explorer.go_on(1)
        if plan is None and explorer.begin(PLAN, 7, LOSS, is_whole=False):
            plan = PLAN
        plans.append(plan)
    cost = SWITCH_COST + 7 * LOSS
    begun = plans.count(PLAN) / 7
    assert begun == pytest.approx(4000 * BUDGET / cost, abs=1)
    first = plans.index(PLAN)
    assert plans[first : first + 8] == [PLAN] * 7 + [None]
