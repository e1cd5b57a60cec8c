# SPDX-License-Identifier: Apache-2.0
"""Trees on vLLM's CPU attention backend: `csrc/tree_attention.cpp`, called with ctypes.

The backend's kernel returns no log-sum-exp, and keeps KV in its own order, which
depends on the instruction set. The place of each element of a block is found once, by
storing numbered tokens; then KV can be read and moved whatever the order is.

Arguments are structs of `csrc/tree_structs.h`, where shapes and dtypes are, one 64-bit
word per field: the address of a tensor's first element, or a number.
"""

import ctypes
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch

from vllm import _custom_ops as ops

from .trees import TreeAttention

LIBRARY = Path(__file__).with_name("_tree_attention.so")
STRUCTS_VERSION = 4  # as in csrc/tree_structs.h
# Integers below this are exact in every dtype of a KV cache.
DIGIT = 16
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
KEYS = 32  # loaded at a time by attention


@cache
def _library() -> ctypes.CDLL:
    """
    Raises:
        OSError: it cannot be loaded.
    """
    if not LIBRARY.exists():
        raise OSError("it was not built")
    library = ctypes.CDLL(str(LIBRARY))
    if ctypes.c_uint32.in_dll(library, "structs_version").value != STRUCTS_VERSION:
        raise OSError("it was built from other sources")
    return library


def why_not_loaded() -> str | None:
    """Why there are no trees on a CPU, and what to do; None if there are."""
    try:
        _library()
    except OSError as why:
        return (
            f"CPU_ATTN: {LIBRARY.name} cannot be loaded: {why} (install a C++ "
            "compiler, g++ or clang++, then reinstall vLLM)"
        )
    return None


def _struct(*values: torch.Tensor | int) -> ctypes.Array:
    words = []
    for value in values:
        is_tensor = isinstance(value, torch.Tensor)
        assert not is_tensor or (value.is_cpu and value.stride(-1) == 1)
        words.append(value.data_ptr() if is_tensor else value)
    return (ctypes.c_int64 * len(words))(*words)


@cache
def _places(
    isa: str, dtype: torch.dtype, block_size: int, head_size: int
) -> torch.Tensor:
    """[2, block_size, head_size] int32: places of a token's K and V in a block."""
    count, is_fp8 = block_size * head_size, dtype == torch.uint8
    numbers = torch.arange(count).view(block_size, 1, head_size)
    found = torch.zeros(2, count, dtype=torch.int64)
    weight = 1
    while weight < count:
        digits = (numbers // weight % DIGIT).to(torch.bfloat16 if is_fp8 else dtype)
        stored = torch.zeros(1, 1, 2 * block_size, head_size, dtype=dtype)
        ops.cpu_attn_reshape_and_cache(
            *(digits, digits, *stored.chunk(2, dim=2), torch.arange(block_size), isa),
            kv_cache_dtype="fp8" if is_fp8 else "auto",
        )
        read = stored.view(torch.float8_e4m3fn).float() if is_fp8 else stored
        found += read.view(2, count).long() * weight
        weight *= DIGIT
    places = found.argsort(1).view(2, block_size, head_size)
    places[1] += count
    return places.int()


@cache
def _runs(places: torch.Tensor) -> tuple[bool, bool]:
    """Whether K of a dimension is contiguous over tokens, V of a token over
    dimensions."""
    keys, values = places
    key_runs = keys.view(-1, KEYS, keys.shape[1]).diff(dim=1)
    return bool((key_runs == 1).all()), bool((values.diff(dim=1) == 1).all())


@cache
def _values(dtype: torch.dtype, *scales: float) -> torch.Tensor:
    """[len(scales), 256] float32: what each byte of an fp8 dtype stands for."""
    values = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    return torch.stack([values * scale for scale in scales])


def _tree_cache(kv_cache: torch.Tensor, isa: str, values=(0, 0)) -> ctypes.Array:
    """The struct of a layer's KV cache, [blocks, HK, block_size, 2 * D].

    Args:
        values: of the bytes of K and V, if it is in fp8 and to be attended to.
    """
    _, heads, block_size, width = kv_cache.shape
    places = _places(isa, kv_cache.dtype, block_size, width // 2)
    flat = kv_cache.view(-1, heads, block_size * width)
    sizes = heads, width // 2, block_size
    runs, strides = _runs(places), flat.stride()[:2]
    return _struct(flat, places, *values, *runs, *strides, *sizes)


def attend(layer, query, kv_cache, metadata, scores, out) -> None:
    """Attention of the rows of trees; see `attend_rows`.

    Sums are float32, whatever the dtype.

    Args:
        layer: whose KV cache it is.
        metadata: CPUAttentionMetadata of a step with trees.
        out: [at least T, HQ * D], written.
    """
    tree: TreeAttention = metadata.draft_tree
    rows, table, values = tree.rows, metadata.block_table, (0, 0)
    out = out.view(-1, *query.shape[1:])
    if scores.scales is not None:
        is_e5m2 = layer.impl.kv_cache_dtype == "fp8_e5m2"
        dtype = torch.float8_e5m2 if is_e5m2 else torch.float8_e4m3fn
        values = _values(dtype, layer._k_scale_float, layer._v_scale_float)
    dtypes = {query.dtype, out.dtype} | {kv_cache.dtype} - {torch.uint8}
    assert len(dtypes) == 1, f"attention of several dtypes: {dtypes}"
    batch = _struct(
        metadata.query_start_loc,
        rows.masks,
        rows.depths,
        rows.prefix_lens,
        rows.num_leading,
        tree.num_reqs,
        tree.max_query_len,
        tree.num_before,
    )
    heads = query.shape[1]
    of_query, of_out = query.stride()[:2], out.stride()[:2]
    sinks = 0 if scores.sinks is None else scores.sinks.float()
    keys = table, table.stride(0), sinks, scores.window
    of_layer = _struct(query, *of_query, out, *of_out, heads, *keys)
    kv, scale = _tree_cache(kv_cache, layer.isa, values), ctypes.c_float(scores.scale)
    dtype = ctypes.c_int64(DTYPES.index(query.dtype))
    _library().attend(batch, kv, of_layer, scale, dtype)


class CPUPathMover:
    """Like `PathMover`, for the CPU backend's order of KV.

    Args:
        layers: by name; their KV caches must be allocated.
        groups: the KV group of each layer.
    """

    def __init__(self, layers: Mapping[str, Any], groups: Mapping[str, int]):
        # As there.
        unique = {(at.kv_cache.data_ptr(), groups[n]): at for n, at in layers.items()}
        self.layers = [(layer, group) for (_, group), layer in unique.items()]

    def __call__(
        self,
        slot_mappings: torch.Tensor,
        path: torch.Tensor,
        num_sampled: torch.Tensor,
        first_rows: torch.Tensor,
    ) -> None:
        """See `PathMover`."""
        (num_reqs, width), stride = path.shape, slot_mappings.stride(0)
        assert path.is_contiguous()
        rows = path, num_sampled, first_rows
        paths = _struct(slot_mappings, stride, *rows, num_reqs, width - 1)
        for layer, group in self.layers:
            kv = _tree_cache(layer.kv_cache, layer.isa)
            numbers = map(ctypes.c_int64, (group, layer.kv_cache.element_size()))
            _library().move_paths(kv, paths, *numbers)
