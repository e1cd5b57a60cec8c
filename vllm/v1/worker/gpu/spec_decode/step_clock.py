# SPDX-License-Identifier: Apache-2.0
"""Times the target and the drafter, without ever waiting for the device."""

import time
from random import Random

import torch

# Fewest steps from one timed step to the next; the number is random, below twice this.
# Often enough for a share, at next to no cost. A fixed number could coincide with
# something regular, such as the first steps of identical requests.
TIMED_EVERY = 16

# Seconds of a step up to its sampled tokens, and from them to its drafts.
StepSeconds = tuple[float, float]


class HostMark:
    """A point in time, with the interface of an event: a CPU runs synchronously."""

    def record(self) -> None:
        self.seconds = time.perf_counter()

    def query(self) -> bool:
        return True

    def elapsed_time(self, later: "HostMark") -> float:
        """Milliseconds from this mark to a later one."""
        return 1e3 * (later.seconds - self.seconds)


def make_mark(device: torch.device) -> "HostMark | torch.cuda.Event":
    """A point in time in a device's stream."""
    if device.type == "cpu":
        return HostMark()
    return torch.cuda.Event(enable_timing=True)


class StepClock:
    """Times a step now and then; the times are read some steps later.

    Three events are recorded in the device's stream, around the parts of a step. No
    other step is timed until they have completed, so that three suffice.
    """

    def __init__(self, device: torch.device):
        self._begin, self._sampled, self._end = (make_mark(device) for _ in range(3))
        self._random = Random(0)
        self._wait = TIMED_EVERY  # steps to the next one that is timed
        self._is_timing = False
        self._is_pending = False

    def begin(self) -> None:
        """A step begins; its inputs are prepared next."""
        self._wait -= 1
        # Already True if the previous step had nothing to run, and did not end.
        self._is_timing = not self._is_pending and self._wait <= 0
        if self._is_timing:
            self._begin.record()

    def sampled(self) -> None:
        """The target's tokens are sampled; drafting comes next."""
        if self._is_timing:
            self._sampled.record()

    def end(self) -> StepSeconds | None:
        """The step's drafts are done.

        Returns:
            The times of this or an earlier step, each returned once; mostly None.
        """
        if self._is_timing:
            self._end.record()
            self._is_timing, self._is_pending = False, True
            self._wait = self._random.randrange(TIMED_EVERY, 2 * TIMED_EVERY)
        if not self._is_pending or not self._end.query():
            return None
        self._is_pending = False
        target = self._begin.elapsed_time(self._sampled)
        draft = self._sampled.elapsed_time(self._end)
        return target / 1e3, draft / 1e3
