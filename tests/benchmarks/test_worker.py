# SPDX-License-Identifier: Apache-2.0
"""Rounds of a worker: the steady part of a log of steps, and how much is drafted."""

from types import SimpleNamespace

import pytest

from benchmarks.spec_decode.worker import Step, Worker, find_steady

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
    steady = find_steady(ROUND, 2)
    assert (steady.begin, steady.end, steady.steady_steps) == (6.0, 9.5, 3)
    assert steady.step_s == 1.0
    assert steady.mean_step_s == pytest.approx(3.5 / 3)
    assert steady.tokens_per_step == pytest.approx((3 + 6 + 4) / 3 / 2)
    assert find_steady(ROUND[:4], 2) is None
    assert find_steady(ROUND, 3) is None


def test_how_much_is_drafted():
    """What is set, and all of it verified, or else what the worker chooses."""
    chooser = SimpleNamespace(fixed=None, verifier="some")
    policy = SimpleNamespace(chooser=chooser)
    steps = SimpleNamespace(policy=policy)
    scheduler = SimpleNamespace(step_drafts=steps, max_num_running_reqs=2)
    worker = Worker.__new__(Worker)
    worker.scheduler, worker.policy, worker.verifier = scheduler, policy, "some"
    worker.draft(5, trims=False)
    assert steps.policy is None and scheduler.dynamic_sd_lookup == [5] * 3
    worker.draft(5, trims=True)
    assert steps.policy is policy and (chooser.fixed, chooser.verifier) == (5, "some")
    worker.draft(None, trims=True)
    assert (chooser.fixed, chooser.verifier) == (None, "some")
