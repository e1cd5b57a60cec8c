# SPDX-License-Identifier: Apache-2.0
"""Warns if drafts are accepted less often than before."""

import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from vllm.config.drafter.drafter import DrafterConfig
from vllm.config.drafter.length import depth_of, trims
from vllm.logger import init_logger
from vllm.v1.core.sched.draft_limit import are_within

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request
    from vllm.v1.spec_decode.accepted_nodes import AcceptedNodes
    from vllm.v1.spec_decode.step_metrics import StepDrafting

logger = init_logger(__name__)

# A recent observation counts half after so many seconds and drafts, whichever is later:
# neither one request's text nor a moment of a full batch is representative.
SECONDS, DRAFTS = 120.0, 4096
# A usual one has so many times that half-life: most of a day.
TIMES = 512
BLOCK = 256  # drafts that are added at once
LEAST_AGE = 8.0  # half-lives of recent observations before anything counts as usual
LEAST_REACHED = 64.0  # drafts that a position needs in order to be compared
FALLEN, RISEN = 0.75, 0.9  # relative acceptance lengths where a fall begins and ends


class FadingRates:
    """How often drafts are accepted if those before them were, by position: [K]."""

    def __init__(self, depth: int):
        self.reached, self.accepted = np.zeros((2, depth))

    def add(self, keep: float, outcomes: Counter[tuple[int, int]]) -> None:
        """Fades older observations to a share of `keep`, then adds drafts, counted by
        their numbers of (drafted, accepted) tokens."""
        self.reached *= keep
        self.accepted *= keep
        for (drafted, accepted), count in outcomes.items():
            self.reached[: min(accepted + 1, drafted)] += count
            self.accepted[:accepted] += count

    def length(self, depth: int) -> float:
        """Acceptance length of drafts of `depth` tokens."""
        rates = self.accepted[:depth] / self.reached[:depth]
        return 1.0 + float(np.cumprod(rates).sum())


class AcceptanceWatch:
    """Compares the acceptance of recent drafts with that of the last day or so.

    It compares chains by position, which depends neither on how many tokens are drafted
    at a load, nor on the further nodes of a tree. With trimming it compares only first
    drafts, since of the later positions only likely drafts are verified.

    Args:
        model: the drafter's name.
        depth: positions to compare.
        limit: first position that the drafter cannot draft.
        depth_of: how deep that many drafts of a request are; as many by default.

    Attributes:
        relative: recent acceptance length divided by the usual one; None at first.
    """

    def __init__(
        self,
        model: str,
        depth: int,
        limit: int,
        depth_of: Callable[[int], int] = int,
    ):
        self.model, self.depth, self.limit = model, depth, limit
        self._depth_of = depth_of
        self.relative: float | None = None
        self._recent, self._usual = FadingRates(depth), FadingRates(depth)
        self._new: list[tuple[int, int]] = []  # drafted, accepted
        self._ended, self._age, self._is_fallen = time.monotonic(), 0.0, False

    @classmethod
    def of(cls, scheduler: "Scheduler") -> "AcceptanceWatch | None":
        """The watch of an engine; None if the unified speculator does not draft."""
        spec = scheduler.vllm_config.speculative_config
        # None for a config that was never resolved, which other code may make.
        drafter = getattr(spec, "drafter", None)
        if not isinstance(drafter, DrafterConfig) or not drafter.is_unified:
            return None
        depth = 1 if trims(spec) else drafter.num_speculative_tokens
        limit = drafter.limit(scheduler.max_model_len)
        return cls(spec.model, depth, limit, partial(depth_of, spec))

    def observe(
        self,
        num_drafts: int,
        num_accepted: int,
        request: "Request",
        tree: "AcceptedNodes | None" = None,
    ) -> None:
        """Records the verified drafts of one request."""
        if not are_within(self.limit, request, num_drafts):
            return
        if tree is not None:
            num_drafts = self._depth_of(num_drafts)
            num_accepted = min(tree.num_best, num_drafts)
        self._new.append((num_drafts, num_accepted))
        if len(self._new) == BLOCK:
            self._end_block(Counter(self._new))
            self._new.clear()

    def tell(self, step: "StepDrafting | None") -> None:
        """Adds the relative acceptance length to a step's stats."""
        if step is not None:
            step.relative_acceptance_length = self.relative

    def _end_block(self, new: Counter[tuple[int, int]]) -> None:
        now = time.monotonic()
        half_lives = min((now - self._ended) / SECONDS, BLOCK / DRAFTS)
        self._recent.add(0.5**half_lives, new)
        self._usual.add(0.5 ** (half_lives / TIMES), new)
        self._ended, self._age = now, self._age + half_lives
        self._compare()

    def _compare(self) -> None:
        depth = int((self._recent.reached >= LEAST_REACHED).argmin()) or self.depth
        recent, usual = self._recent.length(depth), self._usual.length(depth)
        self.relative = recent / usual
        if self._is_fallen:
            self._is_fallen = self.relative < RISEN
        elif self._age >= LEAST_AGE and self.relative < FALLEN:
            self._is_fallen = True
            self._warn(recent, usual, depth)

    def _warn(self, recent: float, usual: float, depth: int) -> None:
        logger.warning(
            "The acceptance length fell to %.2f, where %.2f is usual, of drafts of %d "
            "tokens by %s: requests are of another kind, hotter or under a grammar, or "
            "the weights of the target were changed. If it stays so, a drafter trained "
            "for these requests, or none, may be faster.",
            recent,
            usual,
            depth,
            self.model,
        )
