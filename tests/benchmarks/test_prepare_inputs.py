# SPDX-License-Identifier: Apache-2.0
"""The batches that the input kernel is measured with."""

import pytest
import torch

from benchmarks.spec_decode.prepare_inputs import CONTEXT, first_pass
from vllm.v1.worker.gpu.spec_decode.unified.inputs import prepare_inputs
from vllm.v1.worker.gpu.spec_decode.unified.layout import DraftLayout

K, PROMPT = 3, 40


@pytest.mark.parametrize("num_sources", [0, 1, 3])
@pytest.mark.parametrize("shift", [0, 1])
def test_a_prompt_beside_decodes(shift: int, num_sources: int):
    """All rows are laid out, and fed: none is left to be skipped."""
    layout, query_lens = DraftLayout(K, shift, K), [PROMPT, K + 1, K + 1]
    given = first_pass(layout, query_lens, 4, num_sources, 8, torch.float32)
    buffers = given["buffers"]
    prepare_inputs(**given)
    starts = buffers.batch.query_start_loc.tolist()
    assert starts[3] == given["num_padded_tokens"]
    for begin, valid in zip(starts, [PROMPT, 2, 2], strict=False):
        own = slice(begin, begin + valid + layout.num_extra_slots)
        count = valid + layout.num_extra_slots
        positions = range(CONTEXT, CONTEXT + count)
        assert buffers.batch.positions[own].tolist() == list(positions)
        assert bool((buffers.batch.slot_mappings[0, own] >= 0).all())
        if num_sources:
            assert bool(buffers.fed[own].any(dim=1).all())
            # What is kept of the token before the step, or is learned for masks.
            ones = torch.ones_like(buffers.fed[0])
            at = own.stop - 1 if shift else own.start
            assert torch.equal(buffers.fed[at], ones)
