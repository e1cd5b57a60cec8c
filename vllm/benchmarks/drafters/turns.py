# SPDX-License-Identifier: Apache-2.0
"""Two engines that take turns on one machine, each in its own process.

Other load on a machine comes and goes within seconds. Engines whose rounds follow one
another meet different amounts of it; if they alternate every tenth of a second, both
are slowed down alike, and the ratio of their speeds is hardly affected.
"""

import time
from multiprocessing.connection import Connection

TURN_S = 0.1
GO, PAUSED = "go", "paused"


class Turns:
    """The turns of an engine, and a clock that stands still between them.

    Args:
        pipe: to `take_turns`, which says when a turn begins; None: there are no turns.
    """

    def __init__(self, pipe: Connection | None = None):
        self._pipe, self._paused = pipe, 0.0
        if pipe is not None:
            pipe.recv()
        self._began = time.perf_counter()

    def now(self) -> float:
        return time.perf_counter() - self._paused

    def end_step(self) -> None:
        """To be called between steps; waits if the turn is over."""
        now = time.perf_counter()
        if self._pipe is not None and now - self._began >= TURN_S:
            self._pipe.send(PAUSED)
            self._pipe.recv()
            self._began = time.perf_counter()
            self._paused += self._began - now
