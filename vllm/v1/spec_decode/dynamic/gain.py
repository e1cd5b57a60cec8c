# SPDX-License-Identifier: Apache-2.0
"""The gain over no drafts that is reported while serving. Pure Python."""

from typing import NamedTuple

GAIN_SECONDS = 10.0  # seconds of steps after which a step counts half


class Choice(NamedTuple):
    """What a step drafts, and its expected tokens and seconds."""

    num_drafts: int
    tokens: float  # of the step
    seconds: float


class Gain:
    """Expected throughput of recent steps relative to steps without drafts.

    Attributes:
        value: None until a choice of plans included one without drafts.
    """

    def __init__(self) -> None:
        self.value: float | None = None
        self._seconds = self._undrafted = 0.0

    def add(self, choice: Choice, tokens: float | None, seconds: float | None) -> None:
        """Adds a step; `tokens` and `seconds` are those of one without drafts."""
        if not tokens or seconds is None:
            return
        keep = 0.5 ** (choice.seconds / GAIN_SECONDS)
        undrafted = choice.tokens / tokens * seconds
        self._seconds = keep * self._seconds + choice.seconds
        self._undrafted = keep * self._undrafted + undrafted
        self.value = self._undrafted / self._seconds
