# SPDX-License-Identifier: Apache-2.0
"""Prefix cache hits at block boundaries: the drafter's KV at a block's last position
may depend on the token after it."""

import pytest

from .runner import Request, Served
from .test_unified_speculator import MODES, only_fast, speculative

BLOCK, BLOCKS, DRAFTS = 32, 3, 5
HEADS = ("eagle3", "peagle")  # are fed the next token with each hidden state


@pytest.mark.parametrize("mode", only_fast(MODES, "eagle3"))
def test_hits_at_block_boundary(mode: str, vllm_runner, models, make_prompt):
    """A prompt of whole blocks, then that prompt with another token after it, then with
    the same one. Drafts are as good as without a cache."""
    text = make_prompt(BLOCK * BLOCKS + 1, 5)
    other = [*text[:-1], (text[-1] + 1) % 512]
    requests = [Request(prompt + text[:8], 12) for prompt in (text, other, text)]

    def serve(caches: bool) -> list[Served]:
        with vllm_runner(
            speculative_config=speculative(models, mode, DRAFTS),
            enable_prefix_caching=caches,
            block_size=BLOCK,
            max_num_seqs=2,
            max_model_len=256,
        ) as llm:
            return [llm.generate([one]) for one in requests]

    cached, computed = serve(True), serve(False)
    whole = BLOCK * BLOCKS
    of_other = whole - BLOCK if mode in HEADS else whole
    hits = [served.count("prefix_cache_hits") for served in cached]
    assert hits == [0, of_other, whole]
    for one, same in zip(cached, computed, strict=True):
        assert one.tokens == same.tokens
        for name in ("num_drafts", "num_accepted_tokens_per_pos"):
            assert one.counters[name] == same.counters[name]
