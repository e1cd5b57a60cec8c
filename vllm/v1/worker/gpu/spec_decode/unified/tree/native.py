# SPDX-License-Identifier: Apache-2.0
"""Draft trees for CPU tensors: `csrc/tree_attention.cpp`, and its arguments."""

import ctypes
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import torch

from vllm.v1.worker.gpu.spec_decode.native import NativeLibrary, struct

from .trees import TreeAttention

if TYPE_CHECKING:
    from .cpu import CPUBlocks

Int32 = Annotated[torch.Tensor, torch.int32]
Int64 = Annotated[torch.Tensor, torch.int64]
States = Annotated[torch.Tensor, None]  # of any dtype

KEYS = 32  # loaded at a time by attention


class TreeBatch(NamedTuple):
    """The requests of a step with tree attention; see `TreeAttention`."""

    query_start_loc: Int32  # [at least n + 1]
    masks: Int64  # [max_num_tokens, 2]
    prefix_lens: Int32  # [at least n]
    num_leading: Int32  # [at least n]
    num_reqs: int  # n
    max_query_len: int


class TreeCache(NamedTuple):
    """The KV cache of a layer."""

    kv_cache: States  # [blocks, HK, block_size * 2 * D]
    places: Int32  # [2, block_size, D], places of a token's K and V in a block
    # Whether K of a dimension is contiguous over tokens, V of a token over dimensions.
    has_key_runs: bool
    has_value_runs: bool
    block_stride: int
    head_stride: int
    kv_heads: int  # HK
    size: int  # D
    block_size: int


class TreeLayer(NamedTuple):
    """What attention of a layer reads and writes besides its KV."""

    query: States  # [T, HQ, D]
    row_stride: int
    head_stride: int
    out: States  # [T, HQ, D]
    out_row_stride: int
    out_head_stride: int
    heads: int  # HQ
    block_table: Int32  # [at least n, most blocks]
    table_stride: int


class TreePaths(NamedTuple):
    """The accepted paths of a step; see `PathMover`."""

    slot_mappings: Int64  # [G, T]
    slot_stride: int
    path: Int32  # [n, K + 1]
    num_sampled: Int32  # [n]
    first_rows: Int32  # [n]
    num_reqs: int  # n
    depth: int  # K


LIBRARY = NativeLibrary(
    Path(__file__).with_name("_tree_attention.so"),
    (TreeBatch, TreeCache, TreeLayer, TreePaths),
    "Attention to draft trees runs in PyTorch on the CPU, several times slower than "
    "as C++",
)


def attend(
    library: ctypes.CDLL,
    blocks: "CPUBlocks",
    scale: float,
    query: torch.Tensor,
    metadata: Any,
    output: torch.Tensor,
) -> None:
    """Attention of the rows of trees; all keys are read from the KV cache.

    Sums are float32, whatever the dtype.

    Args:
        query: [T, HQ, D].
        metadata: CPUAttentionMetadata of a step with trees.
        output: [at least T, HQ, D] or [at least T, HQ * D], written.
    """
    heads, size = query.shape[1:]
    out, table = output.view(-1, heads, size), metadata.block_table
    dtypes = {query.dtype, blocks.flat.dtype, out.dtype}
    assert len(dtypes) == 1, f"attention of several dtypes: {dtypes}"
    strides, out_strides = query.stride()[:2], out.stride()[:2]
    layer = TreeLayer(query, *strides, out, *out_strides, heads, table, table.stride(0))
    run = getattr(library, f"attend_{query.dtype}".replace("torch.", ""))
    batch = _batch(metadata.query_start_loc, metadata.draft_tree)
    cache = _cache(blocks)
    run(struct(batch), struct(cache), struct(layer), ctypes.c_float(scale))


def _batch(query_start_loc: torch.Tensor, tree: TreeAttention) -> TreeBatch:
    rows = tree.rows
    of_requests = rows.masks, rows.prefix_lens, rows.num_leading
    return TreeBatch(query_start_loc, *of_requests, tree.num_reqs, tree.max_query_len)


def _cache(blocks: "CPUBlocks") -> TreeCache:
    flat, places = blocks.flat, blocks.places
    sizes = flat.shape[1], places.shape[2], blocks.block_size
    return TreeCache(flat, places, *_runs(places), *flat.stride()[:2], *sizes)


@cache
def _runs(places: torch.Tensor) -> tuple[bool, bool]:
    keys, values = places
    key_runs = keys.view(-1, KEYS, keys.shape[1]).diff(dim=1)
    return bool((key_runs == 1).all()), bool((values.diff(dim=1) == 1).all())


def move_paths(
    library: ctypes.CDLL,
    layers: Iterable[tuple[int, "CPUBlocks"]],
    slot_mappings: torch.Tensor,
    path: torch.Tensor,
    num_sampled: torch.Tensor,
    first_rows: torch.Tensor,
) -> None:
    """Like `PathMover`, for layers given by their KV group and blocks."""
    (num_reqs, width), stride = path.shape, slot_mappings.stride(0)
    assert path.is_contiguous()
    given = slot_mappings, stride, path, num_sampled, first_rows
    paths = struct(TreePaths(*given, num_reqs, width - 1))
    for group, blocks in layers:
        bits = 8 * blocks.flat.element_size()
        run = getattr(library, f"move_paths_{bits}_bits")
        run(struct(_cache(blocks)), paths, ctypes.c_int64(group))
