# SPDX-License-Identifier: Apache-2.0
"""Prefix cache hits at block boundaries: the drafter's KV at a block's last position
may depend on the token after it."""

from typing import Any

import pytest
import torch

from .conftest import RunEngine
from .test_unified_speculator import MODES, only_fast, speculative

BLOCK, BLOCKS, DRAFTS = 32, 3, 5
HEADS = ("eagle3", "peagle")  # are fed the next token with each hidden state


def drafts_at(found: dict[str, Any]) -> list[torch.Tensor]:
    counters = found["counters"]
    return [counters[n] for n in ("num_drafts", "num_accepted_tokens_per_pos")]


@pytest.mark.parametrize("mode", only_fast(MODES, "pard", "eagle3"))
def test_hits_at_block_boundary(mode: str, run_engine: RunEngine, models, make_prompt):
    """A prompt of whole blocks, then that prompt with another token after it, then with
    the same one. Drafts are as good as without a cache."""
    text = make_prompt(BLOCK * BLOCKS + 1, 5)
    shared, other = text[:-1], [*text[:-1], (text[-1] + 1) % 512]
    scenarios = {
        name: [{"prompt": prompt + text[:8], "max_tokens": 12}]
        for name, prompt in (("first", text), ("other", other), ("same", text))
    }
    more = {"block_size": BLOCK, "max_num_seqs": 2, "max_model_len": 256}
    spec = speculative(models, mode, DRAFTS)
    cached, computed = (
        run_engine(
            scenarios, speculative_config=spec, enable_prefix_caching=caches, **more
        )["scenarios"]
        for caches in (True, False)
    )
    hits = {n: cached[n]["counters"]["prefix_cache_hits"][0] for n in scenarios}
    whole = len(shared)
    of_other = whole - BLOCK if mode in HEADS else whole
    assert hits == {"first": 0, "other": of_other, "same": whole}
    for name in scenarios:
        assert cached[name]["tokens"] == computed[name]["tokens"]
        assert drafts_at(cached[name]) == drafts_at(computed[name])
