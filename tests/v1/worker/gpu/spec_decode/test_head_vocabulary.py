# SPDX-License-Identifier: Apache-2.0
"""Drafters with a vocabulary of their own rank logits in it, with the same result as
logits that are spread over the target's vocabulary."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm.v1.spec_decode.vocab_mapping import VocabMapping
from vllm.v1.worker.gpu.spec_decode.unified.drafters import eagle
from vllm.v1.worker.gpu.spec_decode.unified.drafters.eagle import EagleDrafter
from vllm.v1.worker.gpu.spec_decode.unified.sampler import (
    MappedVocabulary,
    OwnVocabulary,
    SpreadVocabulary,
    Vocabulary,
)

from .batches import DEVICE
from .test_draft_vocabulary import tokenizer
from .test_drafters import engine_config
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


class DraftModel:
    """A draft model with only what computing logits needs."""

    def __init__(self, size: int = OWN) -> None:
        torch.manual_seed(1)
        # Ties would go to the lowest id, which differs between vocabularies: no ties.
        self.weight = whole_numbers(HIDDEN, size) + torch.rand(HIDDEN, size)
        shard = SimpleNamespace(org_vocab_start_index=0, org_vocab_end_index=size)
        self.lm_head = SimpleNamespace(
            org_vocab_size=size, shard_indices=shard, num_embeddings_per_partition=size
        )
        self.logits_processor = self

    def __call__(self, lm_head: object, rows: torch.Tensor) -> torch.Tensor:
        return rows @ self.weight

    def compute_logits(self, rows: torch.Tensor) -> torch.Tensor:
        return self(self.lm_head, rows)

    def get_top_tokens(self, lm_head: object, rows: torch.Tensor, bias: Any):
        return (self(lm_head, rows) + (0 if bias is None else bias)).argmax(-1)


class Head(DraftModel):
    """An EAGLE-3 head; the target's ids need not be in its order."""

    def __init__(self, size: int = OWN) -> None:
        super().__init__(size)
        ids = torch.randperm(VOCAB)[:size]
        self.draft_id_to_target_id = ids - torch.arange(size)

    def compute_logits(self, rows: torch.Tensor) -> torch.Tensor:
        logits = torch.full((len(rows), VOCAB), float("-inf"))
        targets = torch.arange(OWN) + self.draft_id_to_target_id
        logits[:, targets] = rows @ self.weight
        return logits


def head() -> tuple[DraftModel, Vocabulary, Vocabulary]:
    """A head, its own vocabulary, and the target's."""
    model = Head()
    return model, OwnVocabulary.of_head(model), Vocabulary(VOCAB)


def draft_model() -> tuple[DraftModel, Vocabulary, Vocabulary]:
    """The same for a draft model; the target lacks every fourth of its tokens."""
    target = [f"word {token}" for token in range(VOCAB)]
    own = [f"word {token}" for token in torch.randperm(VOCAB)[:OWN].tolist()]
    own[::4] = [f"own {token}" for token in range(0, OWN, 4)]
    words = [["</s>", *target[1:]], [*own[:-1], "</s>"]]
    mapping = VocabMapping(*map(tokenizer, words), VOCAB, OWN, "cpu")
    given = mapping, None, DEVICE
    return DraftModel(), MappedVocabulary(*given), SpreadVocabulary(*given)


@pytest.mark.parametrize("drafter", [head, draft_model])
@pytest.mark.parametrize(
    "what, width, exchanges_best",
    [
        ("chain", 1, False),
        ("chain", DRAFTS, False),
        ("chain", DRAFTS, True),
        ("tree", DRAFTS, False),
    ],
)
def test_own_vocabulary_equals_spread_logits(
    drafter, what: str, width: int, exchanges_best: bool
):
    """Compares tokens, and the drafter's confidence or the tree's candidates."""
    model, own, spread = drafter()
    assert (own.size, spread.size) == (OWN, VOCAB)

    def drawn(vocabulary: Vocabulary, exchanges_best: bool) -> list[torch.Tensor]:
        drafting = Drafting("greedy", width)
        drafting.sampler.model, drafting.sampler.vocabulary = model, vocabulary
        drafting.exchanges_best = exchanges_best
        torch.manual_seed(3)
        return getattr(drafting, what)()

    found, wanted = drawn(own, exchanges_best), drawn(spread, False)
    if exchanges_best:  # without whole logits there is no confidence
        found, wanted = found[:1], wanted[:1]
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_head_with_fewer_tokens_than_candidates():
    """Regression: the engine failed on ids outside of the vocabulary."""
    drafting = Drafting("greedy", DRAFTS)
    drafting.sampler.model = model = Head(size=4)
    drafting.sampler.vocabulary = OwnVocabulary.of_head(model)
    log_probs, tokens = drafting.tree()
    known = model.draft_id_to_target_id + torch.arange(4)
    assert (tokens.sort().values == known.sort().values).all()
    torch.testing.assert_close(log_probs.exp().sum(-1), torch.ones(len(log_probs)))


@pytest.mark.parametrize(
    "sampling, lm_head_size, is_own",
    [("greedy", OWN, True), ("probabilistic", OWN, False), ("greedy", VOCAB, False)],
)
def test_which_heads_use_own_vocabulary(
    sampling: str, lm_head_size: int, is_own: bool, monkeypatch
):
    """Probabilistic drafts need logits of the target's vocabulary for verification."""
    model = Head()
    model.lm_head.org_vocab_size = lm_head_size
    monkeypatch.setattr(eagle, "load_eagle_model", lambda *_: model)
    config = engine_config("eagle", sampling=sampling, vocab_size=VOCAB)
    drafter = EagleDrafter(config, DEVICE)
    targets = drafter.vocabulary
    drafter.load(None, config)
    assert isinstance(drafter.vocabulary, OwnVocabulary) == is_own
    assert (drafter.vocabulary is targets) != is_own
