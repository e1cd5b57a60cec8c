# SPDX-License-Identifier: Apache-2.0
"""A drafter's quantized lm_head is a copy: the original weight is not changed."""

import copy
from types import SimpleNamespace

import pytest
import torch
import torch.nn as nn

from vllm.config import ModelConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.quantization.online.fp8 import Fp8PtpcOnlineLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)
from vllm.platforms import current_platform
from vllm.v1.worker.gpu.spec_decode.unified.drafters.draft_model import quantize_lm_head
from vllm.v1.worker.gpu.spec_decode.unified.sampler import MappedVocabulary

FP8 = SimpleNamespace(method="eagle3", draft_lm_head_quantization="fp8")
VOCAB, HIDDEN = 500, 64  # the last 12 of 512 rows are padding


class Model(nn.Module):
    """The parts of a causal language model that an lm_head needs."""

    def __init__(self, is_tied: bool) -> None:
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(VOCAB, HIDDEN)
        self.lm_head = ParallelLMHead(VOCAB, HIDDEN)
        self.logits_processor = LogitsProcessor(VOCAB)
        for table in (self.embed_tokens, self.lm_head):
            table.weight.data.normal_()
        if is_tied:
            self.lm_head = self.lm_head.tie_weights(self.embed_tokens)
        self.lm_head.quant_method.process_weights_after_loading(self.lm_head)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.logits_processor(self.lm_head, hidden)

    def get_top_tokens(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.logits_processor.get_top_tokens(self.lm_head, hidden)


@pytest.fixture
def make_model(models, monkeypatch):
    alone = SimpleNamespace(rank_in_group=0, world_size=1)
    monkeypatch.setattr(parallel_state, "_TP", alone)
    config = VllmConfig(
        model_config=ModelConfig(str(models / "target"), dtype="bfloat16")
    )
    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    torch.manual_seed(0)
    # Nothing is compiled: Dynamo may fail on state that another test has left.
    eager = torch.compiler.set_stance("force_eager")
    device = torch.device(current_platform.device_type)
    with set_current_vllm_config(config), device, eager:
        yield Model
    torch.set_default_dtype(usual)


@pytest.mark.parametrize("is_tied", [False, True])
def test_logits_are_close_to_original_head(is_tied: bool, make_model):
    model = make_model(is_tied)
    hidden, target_head = torch.randn(32, HIDDEN), model.lm_head
    before = copy.deepcopy(target_head.weight)
    exact = model.compute_logits(hidden).float()
    # Also if the model's dtype is not PyTorch's default.
    torch.set_default_dtype(torch.float32)
    quantize_lm_head(model, FP8)
    found = model.compute_logits(hidden)
    assert found.shape == (32, VOCAB) and found.dtype == torch.bfloat16
    assert (found.float() - exact).norm() < 0.05 * exact.norm()
    assert not torch.equal(found.float(), exact)
    assert torch.equal(model.get_top_tokens(hidden), found.argmax(-1))
    assert model.lm_head is not target_head
    assert model.lm_head.weight.dtype == current_platform.fp8_dtype()
    assert torch.equal(target_head.weight, before)
    assert model.embed_tokens.weight.dtype == torch.bfloat16


def test_best_tokens_of_mapped_vocabulary(make_model):
    model = make_model(False)
    quantize_lm_head(model, FP8)
    hidden, ids = torch.randn(32, HIDDEN), torch.arange(VOCAB)
    is_common = ids % 2 == 0
    mapping = SimpleNamespace(
        target_vocab_size=VOCAB,
        draft_vocab_size=VOCAB,
        device=ids.device,
        map_target_to_draft_ids=lambda given: given,
        map_draft_to_target_ids=lambda given: given,
        intersection_mask_draft=is_common,
    )
    found = MappedVocabulary(mapping, None, hidden.device).best_tokens(model, hidden)
    exact = model.compute_logits(hidden).masked_fill(~is_common, float("-inf"))
    assert torch.equal(found, exact.argmax(-1))


def test_unsupported_heads_are_refused(make_model):
    model = make_model(False)
    model.lm_head.quant_method = Fp8PtpcOnlineLinearMethod()
    with pytest.raises(ValueError, match="needs an unquantized fp16/bf16 lm_head"):
        quantize_lm_head(model, FP8)
    with pytest.raises(ValueError, match="an MTP module that shares the target's"):
        quantize_lm_head(model, SimpleNamespace(method="mtp"))
    del model.lm_head
    with pytest.raises(ValueError, match="Model has no lm_head, which draft_lm_head"):
        quantize_lm_head(model, FP8)
