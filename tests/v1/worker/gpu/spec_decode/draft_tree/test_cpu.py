# SPDX-License-Identifier: Apache-2.0
"""Trees on the CPU backend, whose KV layout depends on dtype and head size."""

from types import SimpleNamespace

import pytest
import torch

from vllm.platforms import current_platform

if not current_platform.is_cpu():
    pytest.skip("needs the CPU attention backend", allow_module_level=True)

from vllm import _custom_ops as ops
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa
from vllm.v1.worker.gpu.spec_decode.unified.tree import cpu
from vllm.v1.worker.gpu.spec_decode.unified.tree.attend import Scores, why_layer_cannot
from vllm.v1.worker.gpu.spec_decode.unified.tree.trees import TreeAttention

from .test_kernels import Step
from .test_support import layer

BLOCK, KV_HEADS, SIZE = 32, 2, 64
needs_library = pytest.mark.skipif(
    cpu.why_not_loaded() is not None, reason="the library was not built"
)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
FP8 = {"fp8": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


@pytest.fixture(autouse=True)
def fresh():
    cpu._library.cache_clear()


@pytest.mark.parametrize(
    "text, why",
    [(None, "it was not built ("), ("for another machine", "file too short (")],
)
def test_library_cannot_be_loaded(monkeypatch, tmp_path, text: str | None, why: str):
    monkeypatch.setattr(cpu, "LIBRARY", tmp_path / "_kernel.so")
    if text is not None:
        cpu.LIBRARY.write_text(text)
    reason = why_layer_cannot(layer("CPU_ATTN"))
    assert why in reason and "_kernel.so cannot be loaded: " in reason
    assert "install a C++ compiler" in reason


@needs_library
def test_built_from_other_sources(monkeypatch):
    monkeypatch.setattr(cpu, "STRUCTS_VERSION", 0)
    assert "it was built from other sources (" in why_layer_cannot(layer("CPU_ATTN"))


def store(kv_cache: torch.Tensor, isa: str, slots, keys, values, **fp8) -> None:
    blocks, kv_heads, size, _ = kv_cache.shape
    caches = kv_cache.view(blocks, kv_heads, 2 * size, -1).chunk(2, dim=2)
    ops.cpu_attn_reshape_and_cache(keys, values, *caches, slots, isa, **fp8)


def read(kv_cache: torch.Tensor, isa: str, slots: torch.Tensor) -> torch.Tensor:
    """[2, n, kv_heads, size], K and V at slots [n]."""
    _, kv_heads, block, width = kv_cache.shape
    places = cpu._places(isa, kv_cache.dtype, block, width // 2)[:, slots % block]
    blocks = kv_cache.flatten(2)[slots // block]
    places = places.long()[:, :, None].expand(-1, -1, kv_heads, -1)
    return torch.stack([blocks.gather(2, at) for at in places])


# Query heads, KV heads, head size, block size.
SHAPES = [(4, 2, 64, 32), (3, 1, 80, 64), (40, 1, 32, 32), (2, 2, 128, 128)]


@needs_library
@pytest.mark.parametrize("kept", ["auto", *FP8])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("num_nodes, window", [(3, 9), (20, 0), (20, 70), (100, 0)])
def test_rows_attend_to_prefix_and_ancestors(num_nodes, window, shape, dtype, kept):
    """One request has no prefix, one a prefix of whole blocks, one a long prompt."""
    heads, kv_heads, size, block = shape
    if kept in FP8 and size % 32:
        pytest.skip("vLLM has no fp8 KV cache of this head size")
    step = Step(num_nodes, num_nodes)
    step.prefix[1:3] = 0, 2 * block
    queries = step.query_start_loc.diff()
    step.seq_lens = torch.tensor(step.prefix, dtype=torch.int32) + queries
    step.lay_out()
    torch.manual_seed(num_nodes)
    query = torch.randn(step.starts[-1], heads + 1, size).to(dtype)[:, 1:]
    # Slots that were not written yet may contain anything.
    stored, isa = FP8.get(kept, dtype), _get_attn_isa(dtype, block, size, kept)
    kv_cache = torch.full((32, kv_heads, block, 2 * size), torch.nan).to(stored)
    k_scale, v_scale, scales = 1.0, 1.0, None
    if kept in FP8:
        kv_cache, k_scale, v_scale = kv_cache.view(torch.uint8), 0.7, 1.6
        scales = (torch.ones(()),) * 3
    given = {"k_scale": k_scale, "v_scale": v_scale, "kv_cache_dtype": kept}
    most = -(-int(step.seq_lens.max()) // block)
    table = torch.randperm(32)[: 4 * most].view(4, most)
    kv = []
    for req, length in enumerate(step.seq_lens.tolist()):
        at = torch.arange(length)
        slots = table[req, at // block] * block + at % block
        wanted = torch.randn(2, length, kv_heads, size).to(dtype)
        store(kv_cache, isa, slots, *wanted, **given)
        found = read(kv_cache, isa, slots).view(stored).float()
        found *= torch.tensor([k_scale, v_scale]).view(2, 1, 1, 1)
        rounding = (
            {"atol": 0.02, "rtol": 0.3} if kept in FP8 else {"atol": 0, "rtol": 0}
        )
        torch.testing.assert_close(found, wanted.float(), **rounding)
        kv.append(found.transpose(0, 1))
    longest = int(queries.max())
    metadata = SimpleNamespace(
        query_start_loc=step.query_start_loc,
        block_table=table.int(),
        draft_tree=TreeAttention(step.rows, 4, step.starts[-1], True, longest, longest),
    )
    out = torch.zeros(len(query), heads * size, dtype=dtype)
    sinks = torch.randn(heads).to(dtype) if window else None
    scores = Scores(0.3, 0.0, window, sinks, scales)
    impl = SimpleNamespace(kv_cache_dtype=kept)
    numbers = {"_k_scale_float": k_scale, "_v_scale_float": v_scale}
    layer = SimpleNamespace(isa=isa, impl=impl, **numbers)
    cpu.attend(layer, query, kv_cache, metadata, scores, out)
    wanted = step.attended(query.float(), kv, scores).flatten(1)
    # Sums are float32, rounded once: by half a unit in the last place.
    eps = torch.finfo(dtype).eps / 2 if dtype != torch.float32 else 0
    torch.testing.assert_close(out.float(), wanted, atol=1e-5, rtol=1e-5 + eps)


@needs_library
@pytest.mark.parametrize("dtype", [*DTYPES, torch.uint8])
def test_kv_is_moved_in_layout_of_backend(dtype):
    torch.manual_seed(0)
    is_fp8 = dtype == torch.uint8
    given, kept = (torch.bfloat16, "fp8") if is_fp8 else (dtype, "auto")
    isa = _get_attn_isa(given, BLOCK, SIZE)
    kv_cache = torch.zeros(5, KV_HEADS, BLOCK, 2 * SIZE, dtype=dtype)
    # Layers that share KV, and one of another group with other blocks of the memory.
    slots, groups = torch.randperm(5 * BLOCK)[:48], {"a": 0, "b": 0, "other": 1}
    kv = torch.randn(2, 48, KV_HEADS, SIZE).to(given)
    store(kv_cache, isa, slots, *kv, kv_cache_dtype=kept)
    kv = read(kv_cache, isa, slots)
    layer = SimpleNamespace(kv_cache=kv_cache, isa=isa)
    move = cpu.CPUPathMover(dict.fromkeys(groups, layer), groups)
    path = torch.tensor([[0, 2, 3, 6], [0, 1, 5, 9]], dtype=torch.int32)
    counts, first = torch.tensor([4, 3]), torch.tensor([0, 12])
    move(slots.view(2, 24), path, counts.int(), first.int())
    wanted = kv.clone()
    for req, moves in enumerate([[(2, 1), (3, 2), (6, 3)], [(5, 2)]]):
        for source, to in moves:
            for row in (first[req], 24 + first[req]):
                wanted[:, row + to] = kv[:, row + source]
    assert torch.equal(read(kv_cache, isa, slots), wanted)
