# SPDX-License-Identifier: Apache-2.0
"""How long the target and the drafter take, without ever waiting for the device."""

import time
from random import Random

import torch

# From one timed step to the next there are so many at least, and less than twice as
# many: enough for a share, at next to no cost. Never the same number: it could fall in
# with what comes as regularly, such as the first steps of requests that are all alike.
TIMED_EVERY = 16

# Seconds of a step up to its sampled tokens, and of drafting: from them to its drafts,
# and before the step, where the drafter catches up on what it was left out of.
StepSeconds = tuple[float, float]


class HostMark:
    """A point in time, with the interface of an event. A CPU works as it is told to."""

    def record(self) -> None:
        self.seconds = time.perf_counter()

    def query(self) -> bool:
        return True

    def elapsed_time(self, later: "HostMark") -> float:
        """Milliseconds from this mark to a later one."""
        return 1e3 * (later.seconds - self.seconds)


def make_mark(device: torch.device) -> "HostMark | torch.cuda.Event":
    """A point in time of what a device runs."""
    if device.type == "cpu":
        return HostMark()
    return torch.cuda.Event(enable_timing=True)


class StepClock:
    """Times a step now and then; what it measured is read some steps later.

    On a device four events are recorded in its stream, around what the step runs
    there. While they are on their way no other step is timed, so that four suffice.
    """

    def __init__(self, device: torch.device):
        marks = [make_mark(device) for _ in range(4)]
        self._begin, self._caught_up, self._sampled, self._end = marks
        self._random = Random(0)
        self._wait = TIMED_EVERY  # steps to the next one that is timed
        self._is_timing = False
        self._is_pending = False

    def begin(self) -> None:
        """A step begins: the drafter catches up next, where it was left out."""
        self._wait -= 1
        # Still, where the step before had nothing to run.
        self._is_timing = not self._is_pending and self._wait <= 0
        if self._is_timing:
            self._begin.record()

    def caught_up(self) -> None:
        """The step's inputs are prepared next."""
        if self._is_timing:
            self._caught_up.record()

    def sampled(self) -> None:
        """The target's tokens are sampled; drafting comes next."""
        if self._is_timing:
            self._sampled.record()

    def end(self) -> StepSeconds | None:
        """The step's drafts are made.

        Returns:
            What a step took, this one or an earlier one, once; mostly None.
        """
        if self._is_timing:
            self._end.record()
            self._is_timing, self._is_pending = False, True
            self._wait = self._random.randrange(TIMED_EVERY, 2 * TIMED_EVERY)
        if not self._is_pending or not self._end.query():
            return None
        self._is_pending = False
        target = self._caught_up.elapsed_time(self._sampled)
        draft = self._begin.elapsed_time(self._caught_up)
        draft += self._sampled.elapsed_time(self._end)
        return target / 1e3, draft / 1e3
