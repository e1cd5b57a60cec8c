# SPDX-License-Identifier: Apache-2.0
"""How long the steps of a batch take, by when their outputs come."""

import time
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput


class Steady(NamedTuple):
    """What a step does that decodes: each request has and drafts as many."""

    num_reqs: int
    num_drafts: int
    is_trimmed: bool = False  # however many of them are verified


class StepIntervals:
    """Seconds between the outputs of two steps that do the same.

    Steps run back to back while requests are decoded, whether or not the next one is
    scheduled ahead: so that is what such a step takes, all that the host adds included.
    """

    def __init__(self) -> None:
        self._last: Steady | None = None
        self._ended = 0.0

    def end(self, step: "SchedulerOutput") -> tuple[Steady, float] | None:
        """To be called for each step's output; None where the step before differs."""
        now, kind = time.perf_counter(), _kind(step)
        seconds, is_same = now - self._ended, kind == self._last
        self._ended, self._last = now, kind
        return (kind, seconds) if kind is not None and is_same else None


def _kind(step: "SchedulerOutput") -> Steady | None:
    """None where prompts are computed, or not as much is drafted as there is."""
    num_reqs, drafts = len(step.num_scheduled_tokens), step.num_spec_tokens_to_schedule
    rows = num_reqs * (drafts + 1)
    is_steady = step.total_num_scheduled_tokens == rows and num_reqs
    if not is_steady or step.scheduled_new_reqs:
        return None
    return Steady(num_reqs, drafts, step.verify_budget is not None)
