# SPDX-License-Identifier: Apache-2.0
"""Rotary embeddings on a CPU, of queries as models give them."""

import pytest
import torch

from vllm.config import VllmConfig, set_current_vllm_config
from vllm.platforms import current_platform

if not current_platform.is_cpu():
    pytest.skip("tests the CPU kernel", allow_module_level=True)

from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

TOKENS, HEADS, SIZE, OTHERS = 7, 4, 32, 16


@pytest.fixture(params=[False, True], ids=["interleaved", "neox"])
def rotary(request) -> RotaryEmbedding:
    with set_current_vllm_config(VllmConfig()):
        return RotaryEmbedding(SIZE, SIZE, 64, 10000.0, request.param, torch.float32)


@pytest.mark.parametrize("key_heads", [None, 1, 2])
def test_heads_of_views_are_rotated(rotary, key_heads: int | None):
    """As in MLA models: the last part of each head is rotated, and one key for all."""
    torch.manual_seed(0)
    positions = torch.randint(64, (TOKENS,))
    query = torch.randn(TOKENS, HEADS, OTHERS + SIZE)
    key = key_heads and torch.randn(TOKENS, key_heads, OTHERS + SIZE)
    given = query[..., OTHERS:], key if key is None else key[..., OTHERS:]
    copies = [x if x is None else x.clone() for x in given]
    wanted = rotary.forward_native(positions, *copies)
    found = rotary.forward_cpu(positions, *given)
    for one, other in zip(found, wanted, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other)


def test_rows_are_rotated_in_place(rotary):
    torch.manual_seed(0)
    positions = torch.arange(TOKENS)
    query, key = torch.randn(2, TOKENS, HEADS * SIZE)
    wanted = rotary.forward_native(positions, query.clone(), key.clone())
    rotary.forward_cpu(positions, query, key)
    torch.testing.assert_close((query, key), wanted)
