# SPDX-License-Identifier: Apache-2.0
"""Acceptance of drafters that are quantized to fp8 while loading, against bfloat16."""

from typing import Any

import pytest
import torch

from .conftest import RunEngine
from .test_unified_speculator import MODES, speculative

pytestmark = pytest.mark.slow

FP8 = {"quantization": "fp8_per_channel", "draft_lm_head_quantization": "fp8"}
DRAFTS, REQUESTS, TOKENS = 7, 24, 96
# Logits computed in bfloat16 in different batches differ by less.
ROUNDING = 0.5


def run(run_engine, models, make_prompt, mode: str, **more: Any) -> dict[str, Any]:
    requests = [
        {"prompt": make_prompt(48, seed), "max_tokens": TOKENS}
        for seed in range(REQUESTS)
    ]
    result = run_engine(
        {"all": requests},
        speculative_config=speculative(models, mode, DRAFTS, **more),
        dtype="bfloat16",
        max_model_len=192,
        max_num_seqs=REQUESTS,
    )
    prompts = [request["prompt"] for request in requests]
    return result["scenarios"]["all"] | {"log": result["log"], "prompts": prompts}


def acceptance_by_position(found: dict[str, Any]) -> torch.Tensor:
    """[DRAFTS], share of drafts that were accepted up to each position."""
    counters = found["counters"]
    by_position = torch.tensor(counters["num_accepted_tokens_per_pos"])
    return by_position[:DRAFTS] / counters["num_drafts"][0]


@torch.inference_mode()
def assert_nearly_best(target: torch.nn.Module, found: dict[str, Any]) -> None:
    """Each token has the target's largest logit, up to rounding."""
    for prompt, answer in zip(found["prompts"], found["tokens"], strict=True):
        logits = target(torch.tensor([prompt + answer])).logits[0]
        logits = logits[len(prompt) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
        assert len(answer) == TOKENS
        assert (logits.amax(1) - chosen).max() < ROUNDING


@pytest.mark.parametrize("mode", MODES)
def test_acceptance_is_close_to_bfloat16(
    mode: str, run_engine: RunEngine, models, target, make_prompt
):
    whole = run(run_engine, models, make_prompt, mode)
    found = run(run_engine, models, make_prompt, mode, **FP8)
    said = "Quantized a fp8 copy of the lm_head"
    assert said in found["log"] and said not in whole["log"]
    assert_nearly_best(target, found)
    change = acceptance_by_position(found) - acceptance_by_position(whole)
    assert acceptance_by_position(whole)[0] > 0.5
    assert change.abs().max() < 0.03 and change.mean().abs() < 0.015
