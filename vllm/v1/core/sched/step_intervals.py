# SPDX-License-Identifier: Apache-2.0
"""Times steps by when their outputs arrive at the scheduler."""

import time
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput


class Steady(NamedTuple):
    """A decode step in which every request verifies and drafts `num_drafts` tokens."""

    num_reqs: int
    num_drafts: int
    is_trimmed: bool = False  # whatever the budget


class StepIntervals:
    """Seconds between the outputs of two equal steps.

    Decode steps run back to back, with or without async scheduling, so this is the time
    of such a step, with all of the host's work.
    """

    def __init__(self) -> None:
        self._last: Steady | None = None
        self._ended = 0.0

    def end(self, step: "SchedulerOutput") -> tuple[Steady, float] | None:
        """To be called for each step's output; None if the step before differs."""
        now, kind = time.perf_counter(), _kind(step)
        seconds, is_same = now - self._ended, kind == self._last
        self._ended, self._last = now, kind
        return (kind, seconds) if kind is not None and is_same else None


def _kind(step: "SchedulerOutput") -> Steady | None:
    """None for steps with prompts, or that draft another number than they verify."""
    num_reqs, drafts = len(step.num_scheduled_tokens), step.num_spec_tokens_to_schedule
    rows = num_reqs * (drafts + 1)
    is_steady = step.total_num_scheduled_tokens == rows and num_reqs
    if not is_steady or step.scheduled_new_reqs:
        return None
    return Steady(num_reqs, drafts, step.verify_budget is not None)
