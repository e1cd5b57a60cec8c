# SPDX-License-Identifier: Apache-2.0
"""Trees on the CPU attention backend, whose KV layout depends on dtype and head size.

Tests the native implementation and its fallback in PyTorch.
"""

import itertools
from types import SimpleNamespace

import pytest
import torch

from vllm.platforms import current_platform

if not current_platform.is_cpu():
    pytest.skip("needs the CPU attention backend", allow_module_level=True)

from vllm import _custom_ops as ops
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa
from vllm.v1.worker.gpu.spec_decode.unified.tree import native as native_trees
from vllm.v1.worker.gpu.spec_decode.unified.tree.cpu import (
    CPUBlocks,
    CPUPathMover,
    attend,
)
from vllm.v1.worker.gpu.spec_decode.unified.tree.trees import TreeAttention

from .test_kernels import Step

BLOCK, KV_HEADS, SIZE = 32, 2, 64
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(params=[True, False], ids=["native", "pytorch"])
def native(request, monkeypatch) -> bool:
    if not request.param:
        monkeypatch.setattr(native_trees.NativeLibrary, "loaded", None)
    elif native_trees.LIBRARY.loaded is None:
        pytest.skip("the library was not built")
    return request.param


def store(kv_cache: torch.Tensor, isa: str, slots, keys, values) -> None:
    blocks, kv_heads, size, _ = kv_cache.shape
    caches = kv_cache.view(blocks, kv_heads, 2 * size, -1).chunk(2, dim=2)
    ops.cpu_attn_reshape_and_cache(keys, values, *caches, slots, isa)


# Query heads, KV heads, head size, block size.
SHAPES = [(4, 2, 64, 32), (3, 1, 80, 64), (40, 1, 32, 32), (2, 2, 128, 128)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("num_nodes", [3, 20, 100])
def test_rows_attend_to_prefix_and_ancestors(native, num_nodes, shape, dtype):
    """One request has no prefix, one a prefix of whole blocks, one a long prompt."""
    heads, kv_heads, size, block = shape
    step = Step(num_nodes, num_nodes)
    step.prefix[1:3] = 0, 2 * block
    queries = step.query_start_loc.diff()
    step.seq_lens = torch.tensor(step.prefix, dtype=torch.int32) + queries
    step.lay_out()
    torch.manual_seed(num_nodes)
    query = torch.randn(step.starts[-1], heads + 1, size).to(dtype)[:, 1:]
    kv = torch.randn(step.starts[-1], 2, kv_heads, size).to(dtype)
    # Slots that were not written yet may contain anything.
    isa = _get_attn_isa(dtype, block, size)
    kv_cache = torch.full((32, kv_heads, block, 2 * size), torch.nan, dtype=dtype)
    most = -(-int(step.seq_lens.max()) // block)
    table = torch.randperm(32)[: 4 * most].view(4, most)
    prefixes = []
    for req, (first, last) in enumerate(itertools.pairwise(step.starts)):
        before = torch.randn(step.prefix[req], 2, kv_heads, size).to(dtype)
        at = torch.arange(int(step.seq_lens[req]))
        slots = table[req, at // block] * block + at % block
        store(kv_cache, isa, slots, *torch.cat([before, kv[first:last]]).unbind(1))
        prefixes.append(before.float())
    longest = int(queries.max())
    metadata = SimpleNamespace(
        query_start_loc=step.query_start_loc,
        block_table=table.int(),
        draft_tree=TreeAttention(step.rows, 4, step.starts[-1], True, longest),
    )
    out = torch.zeros(len(query), heads * size, dtype=dtype)
    layer, impl = SimpleNamespace(isa=isa), SimpleNamespace(scale=0.3)
    attend(impl, layer, query, *kv.unbind(1), kv_cache, metadata, out)
    wanted = step.attended(query.float(), kv.float(), prefixes, 0.3).flatten(1)
    # Native code sums in float32 and rounds once: by half a unit in the last place.
    units = 0.5 if native else 4
    eps = torch.finfo(dtype).eps * units if dtype != torch.float32 else 0
    within = {"atol": 1e-5 + (not native) * eps, "rtol": 1e-5 + eps}
    torch.testing.assert_close(out.float(), wanted, **within)


@pytest.mark.parametrize("dtype", DTYPES)
def test_kv_is_read_and_moved_in_layout_of_backend(native, dtype):
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
