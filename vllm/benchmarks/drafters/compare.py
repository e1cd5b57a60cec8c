# SPDX-License-Identifier: Apache-2.0
"""Whether greedy output with drafts is the target's, or differs only by rounding.

Matrix products of other shapes add in another order, so the logits of a batch with
drafts may differ in their last bits from those of a batch without. If two tokens are
that close, either may be chosen, and everything after it differs: a tie. Their logprobs
in a run without speculation tell a tie from an error.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from vllm.benchmarks.drafters.engine import Answer
from vllm.platforms import current_platform

NUM_LOGPROBS = 20
LARGEST_LOGIT = 32
LEAST_TOLERANCE = 1e-3  # float32: sums of thousands
TF32_EPS = 2**-10  # of what a GPU's attention multiplies in float32
# In nats. If a target differs from itself by more, a comparison says nothing: a token
# would tie with another that is e times as likely.
LARGEST_TOLERANCE = 1.0


def tolerance(dtype: str) -> float:
    """Largest gap of a tie, in nats: a bit of two large logits each, in `dtype`."""
    eps = torch.finfo(getattr(torch, dtype)).eps
    if not current_platform.is_cpu():
        eps = max(eps, TF32_EPS)
    return LEAST_TOLERANCE + 2 * LARGEST_LOGIT * eps


class Difference(NamedTuple):
    """Where the output of a request first differs: after how many tokens, and by how
    many nats the target prefers its own token."""

    request: int
    at: int
    gap: float

    def __str__(self) -> str:
        return (
            f"    prompt {self.request} differs after {self.at} tokens, by "
            f"{self.gap:.2f} nats"
        )


@dataclass
class Comparison:
    """All outputs of a side, compared with those without speculation."""

    same: int = 0
    ties: int = 0
    errors: list[Difference] = field(default_factory=list)

    def add(
        self, expected: Sequence[Answer], found: Sequence[Answer], within: float
    ) -> None:
        """Adds a round; if it has more requests than `expected`, they repeat.

        Args:
            within: logprobs this close are a tie, in nats.
        """
        for number, answer in enumerate(found):
            request = number % len(expected)
            difference = compare(request, expected[request], answer.tokens)
            if difference is None:
                self.same += 1
            elif abs(difference.gap) <= within:
                self.ties += 1
            else:
                self.errors.append(difference)

    def __str__(self) -> str:
        total = self.same + self.ties + len(self.errors)
        parts = [f"{self.same} of {total} the same"]
        if self.ties:
            parts.append(f"{self.ties} differ from where two tokens tie")
        if self.errors:
            parts.append(f"{len(self.errors)} DIFFER")
        return ", ".join(parts)


def compare(request: int, expected: Answer, found: list[int]) -> Difference | None:
    """The first difference of an output; None: it is the same."""
    tokens = expected.tokens
    if tokens == found:
        return None
    pairs = enumerate(zip(tokens, found, strict=False))
    shorter = min(len(tokens), len(found))
    at = next((at for at, (a, b) in pairs if a != b), shorter)
    # If only one has ended, it is no tie: stop tokens are among the tokens compared.
    gap = float("inf")
    if at < shorter:
        # A token without a logprob is no likelier than the least likely that has one.
        row = expected.logprobs[at]
        gap = row[tokens[at]] - row.get(found[at], min(row.values()))
    return Difference(request, at, gap)
