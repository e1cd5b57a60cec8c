# SPDX-License-Identifier: Apache-2.0
"""Acceptance of drafters that are quantized to fp8 while loading, against bfloat16."""

from typing import Any

import pytest
import torch

from .runner import Request, Served
from .test_unified_speculator import MODES, speculative

pytestmark = pytest.mark.slow

FP8 = {"quantization": "fp8_per_channel", "draft_lm_head_quantization": "fp8"}
DRAFTS, REQUESTS, TOKENS = 7, 24, 96
# Logits computed in bfloat16 in different batches differ by less.
ROUNDING = 0.5


def acceptance_by_position(served: Served) -> torch.Tensor:
    """[DRAFTS], share of drafts that were accepted up to each position."""
    by_position = torch.tensor(served.counters["num_accepted_tokens_per_pos"])
    return by_position[:DRAFTS] / served.count("num_drafts")


@pytest.mark.parametrize("mode", MODES)
@torch.inference_mode()
def test_acceptance_is_close_to_bfloat16(
    mode: str, vllm_runner, models, target, make_prompt
):
    requests = [Request(make_prompt(48, seed), TOKENS) for seed in range(REQUESTS)]

    def serve(**more: Any) -> tuple[Served, bool]:
        with vllm_runner(
            speculative_config=speculative(models, mode, DRAFTS, **more),
            dtype="bfloat16",
            max_model_len=192,
            max_num_seqs=REQUESTS,
        ) as llm:
            return llm.generate(requests), "a fp8 copy of the lm_head" in llm.log

    (whole, is_copied), (found, is_fp8) = serve(), serve(**FP8)
    assert is_fp8 and not is_copied
    for text, answer in zip(found.texts(requests), found.tokens, strict=True):
        # Each token has the target's largest logit, up to rounding.
        logits = target(torch.tensor([text])).logits[0, -TOKENS - 1 : -1]
        chosen = logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
        assert len(answer) == TOKENS
        assert (logits.amax(1) - chosen).max() < ROUNDING
    change = acceptance_by_position(found) - acceptance_by_position(whole)
    assert acceptance_by_position(whole)[0] > 0.5
    assert change.abs().max() < 0.03 and change.mean().abs() < 0.015
