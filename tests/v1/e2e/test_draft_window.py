# SPDX-License-Identifier: Apache-2.0
"""Drafters with a window: output equals the target's, drafts those of the window."""

from typing import Any

import pytest
import torch

from .conftest import RunEngine
from .oracle import HeadOracle, assert_greedy_output_matches
from .test_unified_speculator import MODES, speculative

pytestmark = pytest.mark.slow

DRAFTS, TOKENS, BLOCK, WINDOW, MAX_MODEL_LEN = 5, 64, 32, 64, 768
LENGTHS = (20, 150, 600)


class WindowedHead(HeadOracle):
    """A head of one layer that attends to the first block and a window.

    Attributes:
        begin: first token of the window.
    """

    begin = 0

    def _layer(
        self, number: int, hidden: torch.Tensor, normed: torch.Tensor
    ) -> torch.Tensor:
        layer, places = self.layers[number], torch.arange(len(hidden))
        is_shown = (places < BLOCK) | (places >= self.begin)
        mask = (places <= places[:, None]) & (is_shown | (places == places[:, None]))
        attended, _ = layer.self_attn(
            normed[None],
            position_embeddings=self.rope(hidden, places[None]),
            attention_mask=torch.zeros(mask.shape).masked_fill(~mask, -1e9)[None, None],
        )
        hidden = hidden + attended[0]
        return hidden + layer.mlp(layer.post_attention_layernorm(hidden))


def run(run_engine, models, make_prompt, mode: str, **more: Any) -> dict[str, Any]:
    requests = [
        {"prompt": make_prompt(length, 5), "max_tokens": TOKENS} for length in LENGTHS
    ]
    result = run_engine(
        {"all": requests},
        speculative_config=speculative(models, mode, DRAFTS, **more),
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=4,
        block_size=BLOCK,
        enable_prefix_caching=False,
        record_drafts=True,
        record_graphs=True,
    )
    assert result["replays"]["first"] > 0
    prompts = [request["prompt"] for request in requests]
    return result["scenarios"]["all"] | {"prompts": prompts}


def possible_begins(known: int, prompt: int) -> set[int]:
    """Possible begins of the window: they depend on the number of valid tokens of the
    previous step. A prompt is a single step."""
    if known == prompt + 1:
        return {0}
    slots = range(1, DRAFTS + 2)
    firsts = [known - 1 - valid for valid in slots]
    return {max(first + 1 - WINDOW, 0) // BLOCK * BLOCK for first in firsts}


def test_drafts_match_windowed_oracle(
    run_engine: RunEngine, models, target, make_prompt
):
    """The keys of a head of one layer only depend on its inputs, not on the window."""
    found = run(run_engine, models, make_prompt, "eagle3", draft_window=WINDOW)
    assert_greedy_output_matches(target, found["prompts"], found["tokens"])
    oracle, whole = (
        kind(models / "eagle3", target, (1, 3, 5))
        for kind in (WindowedHead, HeadOracle)
    )
    compared = differing = 0
    for request, known, drafted in found["drafts"][::3]:
        prompt = found["prompts"][int(request)]
        text = prompt + found["tokens"][int(request)]
        if known > len(text):
            continue
        wanted = []
        for oracle.begin in possible_begins(known, len(prompt)):
            wanted.append(oracle.drafts(text[:known], len(drafted), 1))
        assert drafted in wanted, f"request {request} after {known} tokens"
        compared += 1
        differing += drafted != whole.drafts(text[:known], len(drafted), 1)
    assert compared > 10 and differing > 0


@pytest.mark.parametrize("mode", MODES)
def test_window_of_whole_context_changes_nothing(
    mode: str, run_engine: RunEngine, models, target, make_prompt
):
    found = [
        run(run_engine, models, make_prompt, mode, **window)
        for window in ({}, {"draft_window": MAX_MODEL_LEN}, {"draft_window": WINDOW})
    ]
    whole, same, narrow = found
    assert whole["drafts"] == same["drafts"]
    assert whole["drafts"] != narrow["drafts"]
    for each in found:
        assert_greedy_output_matches(target, each["prompts"], each["tokens"])
        assert each["counters"]["num_accepted_tokens"][0] > 0
