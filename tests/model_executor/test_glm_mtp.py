# SPDX-License-Identifier: Apache-2.0
"""States that GLM's MTP modules hand on to the next draft."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn as nn
from transformers import PretrainedConfig

from vllm.model_executor.models import glm4_moe_lite_mtp, glm4_moe_mtp, glm_ocr_mtp

WIDTH, ROWS = 8, 3


class Twice(nn.Module):
    """Replaces the decoder layer."""

    def __init__(self, **settings) -> None:
        super().__init__()

    def forward(self, positions, hidden_states, residual):
        return hidden_states, hidden_states


def glm4_moe(config: PretrainedConfig) -> nn.Module:
    parallel = SimpleNamespace(enable_eplb=False)
    made = glm4_moe_mtp.Glm4MoeMultiTokenPredictorLayer
    return made(config, "layer", parallel_config=parallel)


def glm4_moe_lite(config: PretrainedConfig) -> nn.Module:
    made = glm4_moe_lite_mtp.Glm4MoeLiteMultiTokenPredictorLayer
    return made(vllm_config=of_drafter(config), prefix="layer")


def glm_ocr(config: PretrainedConfig) -> nn.Module:
    made = glm_ocr_mtp.GlmOcrMultiTokenPredictorLayer
    whole = SimpleNamespace(text_config=config)
    return made(vllm_config=of_drafter(whole), prefix="layer")


def of_drafter(config) -> SimpleNamespace:
    draft = SimpleNamespace(draft_model_config=SimpleNamespace(hf_config=config))
    return SimpleNamespace(speculative_config=draft, quant_config=None)


@pytest.mark.parametrize("make", [glm4_moe, glm4_moe_lite, glm_ocr])
def test_normalized_states_are_handed_on(make, single_rank, monkeypatch):
    """vLLM itself hands on those before the module's last norm."""
    for module, name in (
        (glm4_moe_mtp, "Glm4MoeDecoderLayer"),
        (glm4_moe_lite_mtp, "Glm4MoeLiteDecoderLayer"),
        (glm_ocr_mtp, "Glm4DecoderLayer"),
    ):
        monkeypatch.setattr(module, name, Twice)
    layer = make(PretrainedConfig(hidden_size=WIDTH, rms_norm_eps=1e-6, vocab_size=16))
    for parameter in layer.parameters():
        nn.init.uniform_(parameter, 0.5, 2)
    states = torch.randn(2, ROWS, WIDTH)
    drafted, handed_on = layer(None, torch.arange(ROWS), states[0], states[1])
    assert torch.equal(handed_on, layer.shared_head.norm(drafted))
    assert not torch.allclose(handed_on, drafted)
