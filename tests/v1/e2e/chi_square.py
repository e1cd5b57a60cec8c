# SPDX-License-Identifier: Apache-2.0
"""The chi-square test of counted outcomes against exact probabilities."""

from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import product
from math import prod

import torch

Sequence = tuple[int, ...]
# The chi-square test is not reliable with fewer expected outcomes in a cell.
FEWEST_EXPECTED = 5.0


def sampled(logprobs: torch.Tensor, temperature: float, top_p: float) -> torch.Tensor:
    """[V] probabilities of sampling each token.

    Args:
        logprobs: [V], the model's own, float64.
        temperature: above 0.
        top_p: the smallest set of likeliest tokens with at least this share is kept.
    """
    chances = torch.softmax(logprobs / temperature, dim=-1)
    if top_p < 1:
        ordered, order = chances.sort(descending=True)
        before = ordered.cumsum(-1) - ordered
        chances[order[before >= top_p]] = 0
    return chances / chances.sum()


def sequence_chances(
    logprobs: Mapping[Sequence, torch.Tensor],
    length: int,
    temperature: float,
    top_p: float = 1.0,
) -> dict[Sequence, float]:
    """Probability of every output of `length` tokens.

    Args:
        logprobs: [V] by preceding output, the empty sequence included.
    """
    chances = {
        known: sampled(found.double(), temperature, top_p).tolist()
        for known, found in logprobs.items()
    }
    return {
        tokens: prod(chances[tokens[:i]][token] for i, token in enumerate(tokens))
        for tokens in product(range(len(chances[()])), repeat=length)
    }


def p_value(outcomes: Iterable[Sequence], chances: Mapping[Sequence, float]) -> float:
    """Probability of counts at least as far off, if `chances` are right.

    Cells with few expected outcomes are merged. 0 if there is an outcome of probability
    0.
    """
    counts = Counter(outcomes)
    total = sum(counts.values())
    if any(chances[tokens] == 0 for tokens in counts):
        return 0.0
    rows = [(chance * total, counts[tokens]) for tokens, chance in chances.items()]
    cells = torch.tensor(rows, dtype=torch.float64)
    is_rare = cells[:, 0] < FEWEST_EXPECTED
    rest, cells = cells[is_rare].sum(0, keepdim=True), cells[~is_rare]
    if rest[0, 0] >= FEWEST_EXPECTED:
        cells = torch.cat([cells, rest])
    assert len(cells) > 1, f"{total} outcomes are too few: draw more"
    expected, found = cells.T
    half = ((found - expected) ** 2 / expected).sum() / 2
    return float(torch.special.gammaincc(half.new_tensor((len(cells) - 1) / 2), half))
