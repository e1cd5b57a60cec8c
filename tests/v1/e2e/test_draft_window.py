# SPDX-License-Identifier: Apache-2.0
"""Drafters with a window: output equals the target's, drafts those of the window."""

from typing import Any

import pytest
import torch

from .oracle import HeadOracle, assert_output_matches
from .recorded import Replays
from .runner import Request, Served
from .test_unified_speculator import MODES, speculative
from .watches import Drafts

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


@pytest.fixture
def requests(make_prompt) -> list[Request]:
    return [Request(make_prompt(length, 5), TOKENS) for length in LENGTHS]


@pytest.fixture
def serve(vllm_runner, models, target, requests):
    """Serves the requests with a drafter, whose output is the target's."""

    def serve(mode: str, **window: Any) -> Served:
        with vllm_runner(
            graphs=True,
            speculative_config=speculative(models, mode, DRAFTS, **window),
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=4,
            block_size=BLOCK,
            enable_prefix_caching=False,
        ) as llm:
            llm.watch(Drafts)
            served = llm.generate(requests)
            assert llm.found(Replays)["first"] > 0
        assert_output_matches(target, requests, served)
        return served

    return serve


def possible_begins(known: int, prompt: int) -> set[int]:
    """Possible begins of the window: they depend on the number of valid tokens of the
    previous step. A prompt is a single step."""
    if known == prompt + 1:
        return {0}
    slots = range(1, DRAFTS + 2)
    firsts = [known - 1 - valid for valid in slots]
    return {max(first + 1 - WINDOW, 0) // BLOCK * BLOCK for first in firsts}


def test_drafts_match_windowed_oracle(serve, models, target, requests):
    """The keys of a head of one layer only depend on its inputs, not on the window."""
    served = serve("eagle3", draft_window=WINDOW)
    oracle, whole = (
        kind(models / "eagle3", target, (1, 3, 5))
        for kind in (WindowedHead, HeadOracle)
    )
    texts, compared, differing = served.texts(requests), 0, 0
    for number, known, drafted in served.drafts[::3]:
        prompt, text = requests[number].prompt, texts[number]
        if known > len(text):
            continue
        wanted = []
        for oracle.begin in possible_begins(known, len(prompt)):
            wanted.append(oracle.drafts(text[:known], len(drafted), 1))
        assert drafted in wanted, f"request {number} after {known} tokens"
        compared += 1
        differing += drafted != whole.drafts(text[:known], len(drafted), 1)
    assert compared > 10 and differing > 0


@pytest.mark.parametrize("mode", MODES)
def test_window_of_whole_context_changes_nothing(mode: str, serve):
    whole, same, narrow = (
        serve(mode, **window)
        for window in ({}, {"draft_window": MAX_MODEL_LEN}, {"draft_window": WINDOW})
    )
    assert whole.drafts == same.drafts != narrow.drafts
    for served in (whole, same, narrow):
        assert served.count("num_accepted_tokens") > 0
