# SPDX-License-Identifier: Apache-2.0
"""Ids and logits of draft models with another vocabulary, compared with Runner V1."""

import string
from types import SimpleNamespace

import pytest
import torch

from vllm.config.compilation import CUDAGraphMode
from vllm.config.drafter import DrafterConfig
from vllm.v1.spec_decode.vocab_mapping import VocabMapping
from vllm.v1.worker.gpu.spec_decode.unified.drafters.draft_model import Drafter
from vllm.v1.worker.gpu.spec_decode.unified.inputs import DraftInputs
from vllm.v1.worker.gpu.spec_decode.unified.sampler import MappedVocabulary

from .test_drafters import engine_config

# Most tokens after the first are spelled alike in both.
TARGET = ["</s>", *string.ascii_lowercase, "only the target's"]
DRAFT = ["<mask>", "own", *reversed(string.ascii_letters), "</s>"]
MASK, ROWS = 0, 5


def tokenizer(words: list[str]) -> SimpleNamespace:
    ids = {word: token for token, word in enumerate(words)}
    return SimpleNamespace(
        get_vocab=lambda: ids, unk_token_id=None, eos_token_id=ids["</s>"]
    )


@pytest.fixture
def mapping() -> VocabMapping:
    """A mapping of models that both have padding rows."""
    return VocabMapping(
        tokenizer(TARGET), tokenizer(DRAFT), len(TARGET) + 3, len(DRAFT) + 2, "cpu"
    )


@pytest.fixture
def vocabulary(mapping: VocabMapping) -> MappedVocabulary:
    return MappedVocabulary(mapping, MASK, mapping.device)


@pytest.fixture
def logits(mapping: VocabMapping) -> torch.Tensor:
    """Logits of the draft model; tokens that the target lacks are the likeliest."""
    torch.manual_seed(0)
    values = torch.randn(ROWS, mapping.draft_vocab_size)
    values[:, ~mapping.intersection_mask_draft] += 100
    return values


def test_input_ids_match_runner_v1(mapping, vocabulary):
    ids = torch.arange(mapping.target_vocab_size, dtype=torch.int32)
    fed = vocabulary.input_ids(ids, len(ids))
    assert fed.dtype == torch.int32
    assert fed.tolist() == mapping.map_target_to_draft_ids(ids).tolist()
    b, end = TARGET.index("b"), DRAFT.index("</s>")
    absent = len(TARGET) - 1
    assert fed[[0, b, absent]].tolist() == [end, DRAFT.index("b"), end]
    # The target needs no mask token.
    assert vocabulary.mask_token_id == mapping.target_vocab_size
    mask = torch.tensor([vocabulary.mask_token_id], dtype=torch.int32)
    assert vocabulary.input_ids(mask, 1).tolist() == [MASK]


def test_pass_does_not_change_its_batch(mapping):
    """Graph capture runs a pass several times. Piecewise graphs read one address."""
    resolved = DrafterConfig("draft_model", 3, vocabulary=mapping, mask_token_id=MASK)
    config = engine_config("draft_model", resolved)
    cpu = torch.device("cpu")
    drafter = Drafter(config, cpu)
    buffers = DraftInputs(drafter.layout, 8, 2, cpu)
    laid_out = torch.arange(6, dtype=torch.int32)
    buffers.batch.input_ids[:6] = laid_out
    addresses = set()
    for count in (3, 6, 6):
        fed = drafter.model_inputs(buffers, count, True, CUDAGraphMode.PIECEWISE)
        assert fed["input_ids"].tolist() == drafter.vocabulary.to_draft[:count].tolist()
        addresses.add(fed["input_ids"].data_ptr())
    assert len(addresses) == 1
    assert torch.equal(buffers.batch.input_ids[:6], laid_out)


@pytest.mark.parametrize("ranks", [1, 2])
def test_best_tokens_of_tensor_parallel_ranks(mapping, vocabulary, logits, ranks: int):
    """The vocabulary is padded so that all ranks have equally many rows."""
    size = mapping.draft_vocab_size
    shard = -(-size // 8 // ranks) * 8
    found = []
    for start in range(0, size, shard):
        vocabulary.bias, end = None, min(start + shard, size)

        def top(head, states, bias, start=start, end=end):
            assert len(bias) == shard
            found.append((logits[:, start:end] + bias[: end - start]).max(-1))
            return found[-1].indices + start

        rows = SimpleNamespace(org_vocab_start_index=start, org_vocab_end_index=end)
        head = SimpleNamespace(num_embeddings_per_partition=shard, shard_indices=rows)
        processor = SimpleNamespace(get_top_tokens=top)
        model = SimpleNamespace(lm_head=head, logits_processor=processor)
        vocabulary.best_tokens(model, torch.zeros(ROWS, 4))
    values = torch.stack([of_rank.values for of_rank in found])
    tokens = torch.stack(
        [of_rank.indices + at * shard for at, of_rank in enumerate(found)]
    )
    best = tokens.gather(0, values.argmax(0)[None])[0]
    assert best.equal(mapping.constrain_draft_logits(logits).argmax(-1))
