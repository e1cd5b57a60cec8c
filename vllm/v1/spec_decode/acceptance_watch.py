# SPDX-License-Identifier: Apache-2.0
"""Whether drafts are still accepted as they were: one warning where they are not."""

import time
from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

from vllm.config.drafter.drafter import DrafterConfig
from vllm.config.drafter.length import trims
from vllm.logger import init_logger
from vllm.v1.core.sched.draft_limit import are_within

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request
    from vllm.v1.spec_decode.accepted_nodes import AcceptedNodes
    from vllm.v1.spec_decode.step_metrics import StepDrafting

logger = init_logger(__name__)

# What was seen counts half after so many seconds and so many drafts, whichever is
# later: a lone request's text, and a moment of a full batch, are no measure.
SECONDS, DRAFTS = 120.0, 4096
# And in what is usual, after so many times as much: the better part of a day.
TIMES = 512
BLOCK = 256  # drafts that are taken in at once
LEAST_AGE = 8.0  # half-lives of what is recent before anything is called usual
LEAST_REACHED = 64.0  # drafts of a position, or nothing is said of it
FALLEN, RISEN = 0.75, 0.9  # relative acceptance lengths where a fall begins and ends


class FadingRates:
    """How often drafts are accepted if those before them were, by position: [K]."""

    def __init__(self, depth: int):
        self.reached, self.accepted = np.zeros((2, depth))

    def add(self, keep: float, outcomes: Counter[tuple[int, int]]) -> None:
        """Takes in so many drafts of each (drafted, accepted) number of tokens, after
        older ones faded to a share of `keep`."""
        self.reached *= keep
        self.accepted *= keep
        for (drafted, accepted), count in outcomes.items():
            self.reached[: min(accepted + 1, drafted)] += count
            self.accepted[:accepted] += count

    def length(self, depth: int) -> float:
        """Acceptance length of drafts of so many tokens."""
        rates = self.accepted[:depth] / self.reached[:depth]
        return 1.0 + float(np.cumprod(rates).sum())


class AcceptanceWatch:
    """Compares the acceptance of recent drafts with that of the last day or so.

    It is that of chains: acceptance by position does not depend on how many tokens a
    load lets draft, nor on a tree's further nodes. Where only the likeliest drafts are
    verified, that of the first drafts alone: of later ones only likely ones are.

    Args:
        model: the drafter's name.
        depth: positions to compare.
        limit: first position that the drafter cannot draft.

    Attributes:
        relative: recent acceptance length over the usual one; None at first.
    """

    def __init__(self, model: str, depth: int, limit: int):
        self.model, self.depth, self.limit = model, depth, limit
        self.relative: float | None = None
        self._recent, self._usual = FadingRates(depth), FadingRates(depth)
        self._new: list[tuple[int, int]] = []  # drafted, accepted
        self._ended, self._age, self._is_fallen = time.monotonic(), 0.0, False

    @classmethod
    def of(cls, scheduler: "Scheduler") -> "AcceptanceWatch | None":
        """None where the unified speculator does not draft."""
        spec = scheduler.vllm_config.speculative_config
        # Not of a config that was never resolved, as code of others may make one.
        drafter = getattr(spec, "drafter", None)
        if not isinstance(drafter, DrafterConfig) or not drafter.is_unified:
            return None
        depth = 1 if trims(spec) else drafter.num_speculative_tokens
        return cls(spec.model, depth, drafter.limit(scheduler.max_model_len))

    def observe(
        self,
        num_drafts: int,
        num_accepted: int,
        request: "Request",
        tree: "AcceptedNodes | None" = None,
    ) -> None:
        """Takes in the verified drafts of one request."""
        if not are_within(self.limit, request, num_drafts):
            return
        if tree is not None:
            num_accepted = tree.num_best
        self._new.append((num_drafts, num_accepted))
        if len(self._new) == BLOCK:
            self._end_block(Counter(self._new))
            self._new.clear()

    def tell(self, step: "StepDrafting | None") -> None:
        """Adds to a step's stats how acceptance compares."""
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
