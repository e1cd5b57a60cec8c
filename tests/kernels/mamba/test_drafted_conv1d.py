# SPDX-License-Identifier: Apache-2.0
"""Causal convolution over drafts, some of which are rejected, on a CPU."""

import random

import pytest
import torch
import torch.nn.functional as F

from vllm.model_executor.layers.mamba.ops.causal_conv1d import causal_conv1d_update

pytest.importorskip("vllm.model_executor.layers.mamba.ops.cpu.drafted_conv1d")
DIM, WIDTH, MOST = 6, 4, 5  # MOST: maximum number of tokens per request and step
NUM_BLOCKS, NULL = 7, 0


@pytest.mark.parametrize("activation", ["silu", None])
def test_conv_state_keeps_accepted_tokens_only(on_cpu, activation):
    """With varying lengths, up to the maximum, and padding."""
    if not on_cpu:
        pytest.skip("a GPU has a kernel of vLLM's own")
    torch.manual_seed(0)
    rng = random.Random(0)
    weight, bias = torch.randn(DIM, WIDTH), torch.randn(DIM)
    states = torch.zeros(NUM_BLOCKS, DIM, WIDTH - 1 + MOST - 1)
    blocks = torch.tensor([[3, 4], [NULL, NULL], [5, 6]], dtype=torch.int32)
    texts = [torch.zeros(0, DIM) for _ in blocks]  # accepted inputs
    accepted = torch.ones(len(blocks), dtype=torch.int32)
    for _ in range(20):
        fed = [torch.randn(rng.randint(1, MOST), DIM) for _ in blocks]
        ends = torch.tensor([0, *map(len, fed)]).cumsum(0).int()
        made = causal_conv1d_update(
            torch.cat(fed),
            states,
            weight,
            bias,
            activation,
            conv_state_indices=blocks,
            num_accepted_tokens=accepted,
            query_start_loc=ends,
            max_query_len=MOST,
        )
        for row, rows in enumerate(made.split([*map(len, fed)])):
            if blocks[row, 0] == NULL:
                continue
            text = F.pad(torch.cat([texts[row], fed[row]]).T, (WIDTH - 1, 0))
            wanted = F.conv1d(text[None], weight[:, None], bias, groups=DIM)[0].T
            wanted = F.silu(wanted) if activation else wanted
            torch.testing.assert_close(rows, wanted[-len(fed[row]) :])
            accepted[row] = rng.randint(1, len(fed[row]))
            texts[row] = torch.cat([texts[row], fed[row][: accepted[row]]])
