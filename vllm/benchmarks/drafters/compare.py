# SPDX-License-Identifier: Apache-2.0
"""Whether output with drafts is the target's own, and if not, whether by rounding.

Products of another shape add in another order, so the logits of a batch with drafts may
differ from those of one without in their last bits. Where the target has two tokens
that are that close, either may come, and all behind it differs: a tie. What the target
says of the two tokens, in a run without speculation, tells a tie from an error. Of a
request with a seed the noise that it draws by is known, and is added.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from vllm.benchmarks.drafters.engine import Answer
from vllm.v1.worker.gpu.spec_decode.noise import keyed_noise

# What the target says is asked for of as many tokens as it may draw.
NUM_LOGPROBS = 20
SEEDED = {"temperature": 0.8, "top_k": NUM_LOGPROBS}
LARGEST_LOGIT = 32
SHOWN_TOKENS = 12
LEAST_TOLERANCE = 1e-3  # float32: sums of thousands, or products in TF32
# Where a target differs from itself by more, in nats, its answers tell nothing: tokens
# that are e times as likely as others would tie.
LARGEST_TOLERANCE = 1.0


def tolerance(dtype: str) -> float:
    """Logprobs this close may change places: a bit of a large logit, in `dtype`."""
    eps = torch.finfo(getattr(torch, dtype)).eps
    return max(LEAST_TOLERANCE, LARGEST_LOGIT * eps)


@dataclass(frozen=True)
class Expected:
    """What a request answers without speculation.

    Attributes:
        sampling: the request's; greedy where its temperature is 0.
    """

    prompt: list[int]
    answer: Answer
    sampling: dict[str, Any]

    def gap(self, at: int, token: int) -> float:
        """By how much its own token beats another one there, in nats.

        A token that is not among those asked for is no likelier than the last of them.
        """
        row, own = self.answer.logprobs[at], self.answer.tokens[at]
        logprobs = np.array([row[own], row.get(token, min(row.values()))])
        if not (temperature := self.sampling["temperature"]):
            return float(logprobs[0] - logprobs[1])
        before = len(self.prompt) + at - 1
        noise = keyed_noise(self.sampling["seed"], before, np.array([own, token]))
        scores = logprobs + temperature * noise
        return float(scores[0] - scores[1])


@dataclass(frozen=True)
class Difference:
    """Where an answer first differs.

    Attributes:
        request: its number.
        at: tokens of the answer that are the same.
        before: the last of these.
        expected, found: tokens; None: the answer has ended.
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
    """All answers of one setting beside those without speculation."""

    same: int = 0
    ties: list[Difference] = field(default_factory=list)
    errors: list[Difference] = field(default_factory=list)

    def add(
        self, expected: Sequence[Expected], found: Sequence[Answer], within: float
    ) -> None:
        """Takes in a round, whose requests begin anew where there are more.

        Args:
            within: logprobs this close tie.
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
    """The first difference of an answer; None: it is the same."""
    own = expected.answer.tokens
    if own == found:
        return None
    pairs = enumerate(zip(own, found, strict=False))
    shorter = min(len(own), len(found))
    at = next((at for at, (a, b) in pairs if a != b), shorter)
    # Where one ends and the other goes on there is no tie: an end is a token, too.
    gap = expected.gap(at, found[at]) if at < shorter else float("inf")
    before = own[max(0, at - SHOWN_TOKENS) : at]
    tokens = own[at] if at < len(own) else None, found[at] if at < len(found) else None
    return Difference(request, at, before, *tokens, gap, abs(gap) <= within)
