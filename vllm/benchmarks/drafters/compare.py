# SPDX-License-Identifier: Apache-2.0
"""Whether output with drafts is the target's own, or differs only by rounding.

Matrix products of other shapes add in another order, so the logits of a batch with
drafts may differ in their last bits from those of a batch without. If two tokens are
that close, either may be chosen, and everything after it differs: a tie. Their logprobs
in a run without speculation tell a tie from an error. For a request with a seed the
sampling noise is known, and is added to them. There, two tokens may also tie for the
last place of the top-k, and the one that gets it may be chosen.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from vllm.benchmarks.drafters.engine import Answer
from vllm.platforms import current_platform
from vllm.v1.worker.gpu.spec_decode.noise import keyed_noise

# Logprobs are requested for as many tokens as may be sampled.
NUM_LOGPROBS = 20
SEEDED = {"temperature": 0.8, "top_k": NUM_LOGPROBS}
LARGEST_LOGIT = 32
SHOWN_TOKENS = 12
LEAST_TOLERANCE = 1e-3  # float32: sums of thousands
TF32_EPS = 2**-10  # of what a GPU's attention multiplies in float32
# In nats. If a target differs from itself by more, a comparison says nothing: a token
# would tie with another that is e times as likely.
LARGEST_TOLERANCE = 1.0


def tolerance(dtype: str) -> float:
    """Largest gap of a tie, in nats: a bit of a large logit, in `dtype`."""
    eps = torch.finfo(getattr(torch, dtype)).eps
    if not current_platform.is_cpu():
        eps = max(eps, TF32_EPS)
    return max(LEAST_TOLERANCE, LARGEST_LOGIT * eps)


@dataclass(frozen=True)
class Expected:
    """The output of a request without speculation.

    Attributes:
        sampling: the request's parameters; greedy if its temperature is 0.
    """

    prompt: list[int]
    answer: Answer
    sampling: dict[str, Any]

    def gap(self, at: int, token: int) -> float:
        """By how many nats its own token at index `at` beats another one."""
        return self._score(at, self.answer.tokens[at]) - self._score(at, token)

    def is_tie(self, at: int, token: int, within: float) -> bool:
        """Whether another token may be chosen at index `at` if logprobs are off by
        `within` nats at most."""
        gap = self.gap(at, token)
        if abs(gap) <= within or not self.sampling["temperature"]:
            return abs(gap) <= within
        if gap < 0:  # here the other one was left out of the top-k
            return self._is_last(at, token, within)
        own, score = self.answer.tokens[at], self._score(at, token)
        others = self.answer.logprobs[at].keys() - {own, token}
        is_next = all(self._score(at, other) <= score + within for other in others)
        return is_next and self._is_last(at, own, within)

    def _score(self, at: int, token: int) -> float:
        """What sampling maximises: the logprob, and noise if there is a temperature."""
        logprob = self._logprob(at, token)
        if not (temperature := self.sampling["temperature"]):
            return logprob
        before = len(self.prompt) + at - 1
        noise = keyed_noise(self.sampling["seed"], before, np.array([token]))
        return float(logprob + temperature * noise[0])

    def _logprob(self, at: int, token: int) -> float:
        """A token without one is no likelier than the least likely that has one."""
        row = self.answer.logprobs[at]
        return row.get(token, min(row.values()))

    def _is_last(self, at: int, token: int, within: float) -> bool:
        """Whether a token may be the last of the top-k, or the first that is not."""
        least = min(self.answer.logprobs[at].values())
        return self._logprob(at, token) <= least + within


@dataclass(frozen=True)
class Difference:
    """Where an output first differs.

    Attributes:
        request: its number.
        at: number of tokens before it, which are the same.
        before: the last of these.
        expected, found: tokens; None: the output has ended.
        gap: by how much the target prefers the expected one, in nats.
    """

    request: int
    at: int
    before: list[int]
    expected: int | None
    found: int | None
    gap: float
    is_tie: bool


@dataclass
class Comparison:
    """All outputs of one setting, compared with those without speculation."""

    same: int = 0
    ties: list[Difference] = field(default_factory=list)
    errors: list[Difference] = field(default_factory=list)

    def add(
        self, expected: Sequence[Expected], found: Sequence[Answer], within: float
    ) -> None:
        """Adds a round; if it has more requests than `expected`, they repeat.

        Args:
            within: logprobs this close are a tie, in nats.
        """
        for number, answer in enumerate(found):
            request = number % len(expected)
            difference = compare(request, expected[request], answer.tokens, within)
            if difference is None:
                self.same += 1
            else:
                (self.ties if difference.is_tie else self.errors).append(difference)

    def __add__(self, other: "Comparison") -> "Comparison":
        ties, errors = self.ties + other.ties, self.errors + other.errors
        return Comparison(self.same + other.same, ties, errors)

    def describe(self) -> str:
        total = self.same + len(self.ties) + len(self.errors)
        parts = [f"{self.same} of {total} the same"]
        if self.ties:
            parts.append(f"{len(self.ties)} differ from where two tokens tie")
        if self.errors:
            parts.append(f"{len(self.errors)} DIFFER")
        return ", ".join(parts)


def compare(
    request: int, expected: Expected, found: Sequence[int], within: float
) -> Difference | None:
    """The first difference of an output; None: it is the same."""
    own = expected.answer.tokens
    if own == found:
        return None
    pairs = enumerate(zip(own, found, strict=False))
    shorter = min(len(own), len(found))
    at = next((at for at, (a, b) in pairs if a != b), shorter)
    # Only one has ended: no tie, since a stop token is among the tokens compared.
    gap, is_tie = float("inf"), False
    if at < shorter:
        gap = expected.gap(at, found[at])
        is_tie = expected.is_tie(at, found[at], within)
    before = own[max(0, at - SHOWN_TOKENS) : at]
    tokens = own[at] if at < len(own) else None, found[at] if at < len(found) else None
    return Difference(request, at, before, *tokens, gap, is_tie)
