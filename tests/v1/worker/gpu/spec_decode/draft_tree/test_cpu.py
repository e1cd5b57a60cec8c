# SPDX-License-Identifier: Apache-2.0
"""KV in the order of the CPU attention backend, which the type and head size decide.

Attention itself is tested by `tests/v1/e2e/test_draft_trees.py`.
"""

import pytest
import torch

from vllm.platforms import current_platform

if not current_platform.is_cpu():
    pytest.skip("needs the CPU attention backend", allow_module_level=True)

from vllm import _custom_ops as ops
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa
from vllm.v1.worker.gpu.spec_decode.draft_tree.cpu import CPUBlocks, CPUPathMover

BLOCK, KV_HEADS, SIZE = 32, 2, 64


def store(kv_cache: torch.Tensor, isa: str, slots, keys, values) -> None:
    blocks = kv_cache.view(kv_cache.shape[0], KV_HEADS, 2 * BLOCK, -1)
    caches = blocks.chunk(2, dim=2)
    ops.cpu_attn_reshape_and_cache(keys, values, *caches, slots, isa)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kv_is_read_and_moved_in_the_order_of_the_backend(dtype: torch.dtype):
    torch.manual_seed(0)
    isa = _get_attn_isa(dtype, BLOCK, SIZE)
    kv_cache = torch.zeros(5, KV_HEADS, BLOCK, 2 * SIZE, dtype=dtype)
    slots = torch.randperm(5 * BLOCK)[:24]
    kv = torch.randn(2, 24, KV_HEADS, SIZE).to(dtype)
    store(kv_cache, isa, slots, *kv)
    found = CPUBlocks(kv_cache, isa).read(slots)
    assert torch.equal(torch.stack(found), kv)

    both = ("a", "b")  # layers that share a cache
    move = CPUPathMover(*(dict.fromkeys(both, x) for x in (kv_cache, 0, isa)))
    path = torch.tensor([[0, 2, 3, 6], [0, 1, 5, 9]], dtype=torch.int32)
    counts, first = torch.tensor([4, 3]), torch.tensor([0, 12])
    move(slots[None], path, counts.int(), first.int())
    wanted = kv.clone()
    for req, moves in enumerate([[(2, 1), (3, 2), (6, 3)], [(5, 2)]]):
        for source, to in moves:
            wanted[:, first[req] + to] = kv[:, first[req] + source]
    found = CPUBlocks(kv_cache, isa).read(slots)
    assert torch.equal(torch.stack(found), wanted)
