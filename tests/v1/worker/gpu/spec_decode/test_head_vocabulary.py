# SPDX-License-Identifier: Apache-2.0
"""Heads of fewer tokens than the target: their own logits are ranked, and what is found
is what logits spread over the target's vocabulary say."""

from types import SimpleNamespace

import pytest
import torch

from .test_logits_slices import (
    DRAFTS,
    HIDDEN,
    VOCAB,
    Drafting,
    on_device,
    whole_numbers,
)

__all__ = ["on_device"]

OWN = VOCAB // 3


class Head:
    """An EAGLE-3 head, as far as it is asked for logits; ids need not be in order."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        # Of equal logits the lowest id is drafted, in either numbering: there are none.
        self.weight = whole_numbers(HIDDEN, OWN) + torch.rand(HIDDEN, OWN)
        ids = torch.randperm(VOCAB)[:OWN]
        self.draft_id_to_target_id = ids - torch.arange(OWN)
        self.lm_head = SimpleNamespace(org_vocab_size=OWN)
        self.logits_processor = self

    def __call__(self, lm_head: object, rows: torch.Tensor) -> torch.Tensor:
        return rows @ self.weight

    def get_top_tokens(self, lm_head: object, rows: torch.Tensor) -> torch.Tensor:
        return self(lm_head, rows).argmax(-1)

    def compute_logits(self, rows: torch.Tensor) -> torch.Tensor:
        logits = torch.full((len(rows), VOCAB), float("-inf"))
        targets = torch.arange(OWN) + self.draft_id_to_target_id
        logits[:, targets] = rows @ self.weight
        return logits


def drafting(width: int, method: str = "greedy") -> Drafting:
    made = Drafting(method, width)
    made.made.model = Head()
    return made


def drawn(what: str, width: int, is_own: bool, **given) -> list[torch.Tensor]:
    made = drafting(width)
    if is_own:
        made.made.head_ids = made.made._find_head_ids()
        assert made.made.head_ids is not None
    for name, value in given.items():
        setattr(made.made, name, value)
    torch.manual_seed(3)
    return getattr(made, what)()


@pytest.mark.parametrize(
    "what, width", [("chain", 1), ("chain", DRAFTS), ("tree", DRAFTS)]
)
def test_own_logits_say_the_same(what: str, width: int):
    """Tokens; how sure the drafter is of them, or what candidates there are."""
    spread, own = (drawn(what, width, is_own) for is_own in (False, True))
    torch.testing.assert_close(own, spread, rtol=1e-4, atol=1e-5)


def test_ranks_exchange_their_best():
    spread, *_ = drawn("chain", DRAFTS, False)
    own, *_ = drawn("chain", DRAFTS, True, use_local_argmax_reduction=True)
    assert torch.equal(own, spread)


def test_probabilistic_drafts_are_of_the_targets_vocabulary():
    assert drafting(DRAFTS, "probabilistic").made._find_head_ids() is None


def test_a_head_with_the_targets_lm_head_is_spread():
    made = drafting(DRAFTS).made
    made.model.lm_head.org_vocab_size = VOCAB
    assert made._find_head_ids() is None
