# SPDX-License-Identifier: Apache-2.0
"""Prefix cache hits at block boundaries: the drafter's KV at a block's last position
may depend on the token after it."""

import pytest

from .runner import Request, Served
from .test_unified_speculator import MODES, only_fast, speculative
from .watches import Drafts

BLOCK, BLOCKS, DRAFTS = 32, 3, 5
HEADS = ("eagle3", "peagle")  # are fed the next token with each hidden state


@pytest.mark.parametrize("mode", only_fast(MODES, "eagle3"))
def test_drafts_do_not_depend_on_hits(mode: str, vllm_runner, models, make_prompt):
    """A prompt of whole blocks, then that prompt with another token after it, then with
    the same one; then prompts with a shared prefix, computed in the same step, that
    end at, before or after a block boundary."""
    text, shared = make_prompt(BLOCK * BLOCKS + 1, 5), make_prompt(2 * BLOCK, 6)
    other = [*text[:-1], (text[-1] + 1) % 512]
    asked = [[Request(prompt + text[:8], 12)] for prompt in (text, other, text)]
    prompts = *(shared + text[:more] for more in (3, 40, 0)), shared[: BLOCK + 1]
    asked.append([Request(prompt, 12) for prompt in prompts])

    def serve(caches: bool) -> list[Served]:
        with vllm_runner(
            speculative_config=speculative(models, mode, DRAFTS),
            enable_prefix_caching=caches,
            block_size=BLOCK,
            max_num_seqs=4,
            max_model_len=256,
        ) as llm:
            llm.watch(Drafts)
            return [llm.generate(requests) for requests in asked]

    cached, computed = serve(True), serve(False)
    whole = BLOCK * BLOCKS
    of_other = whole - BLOCK if mode in HEADS else whole
    hits = [served.count("prefix_cache_hits") for served in cached]
    assert hits[:3] == [0, of_other, whole] and hits[3] > 0
    for one, same in zip(cached, computed, strict=True):
        assert one.tokens == same.tokens
        assert sorted(one.drafts) == sorted(same.drafts) != []
