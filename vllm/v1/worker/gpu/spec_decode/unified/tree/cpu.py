# SPDX-License-Identifier: Apache-2.0
"""Trees on vLLM's CPU attention backend: in C++, or else in plain PyTorch.

The backend's kernel returns no log-sum-exp, and keeps KV in its own order, which
depends on the instruction set. The place of each element of a block is found once, by
storing numbered tokens; then KV can be read and moved whatever the order is.
"""

from collections.abc import Mapping
from functools import cache

import torch
import torch.nn.functional as F

from vllm import _custom_ops as ops

from . import native
from .trees import TreeAttention

# Integers below this are exact in every dtype of a KV cache.
DIGIT = 128


@cache
def _places(
    isa: str, dtype: torch.dtype, block_size: int, head_size: int
) -> torch.Tensor:
    """[2, block_size, head_size] int32: places of a token's K and V in a block."""
    count = block_size * head_size
    numbers = torch.arange(count).view(block_size, 1, head_size)
    found = torch.zeros(2, count, dtype=torch.int64)
    weight = 1
    while weight < count:
        digits = (numbers // weight % DIGIT).to(dtype)
        stored = torch.zeros(1, 1, 2 * block_size, head_size, dtype=dtype)
        ops.cpu_attn_reshape_and_cache(
            digits, digits, *stored.chunk(2, dim=2), torch.arange(block_size), isa
        )
        found += stored.view(2, count).long() * weight
        weight *= DIGIT
    places = found.argsort(1).view(2, block_size, head_size)
    places[1] += count
    return places.int()


class CPUBlocks:
    """KV of a layer by slot, whatever the order within its blocks.

    Args:
        kv_cache: [blocks, HK, block_size, 2 * D].
        isa: that of the layer.
    """

    def __init__(self, kv_cache: torch.Tensor, isa: str):
        _, heads, self.block_size, width = kv_cache.shape
        self.places = _places(isa, kv_cache.dtype, self.block_size, width // 2)
        self.flat = kv_cache.view(-1, heads, self.block_size * width)

    def _index(self, slots: torch.Tensor, part: int) -> tuple[torch.Tensor, ...]:
        blocks = (slots // self.block_size)[:, None, None]
        heads = torch.arange(self.flat.shape[1])[None, :, None]
        return blocks, heads, self.places[part, slots % self.block_size][:, None]

    def read(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V at slots [n], each [n, HK, D]."""
        return self.flat[self._index(slots, 0)], self.flat[self._index(slots, 1)]

    def move(self, source: torch.Tensor, to: torch.Tensor) -> None:
        """Copies K and V from slots [n] to slots [n]."""
        for part in (0, 1):
            self.flat[self._index(to, part)] = self.flat[self._index(source, part)]


def attend(impl, layer, query, key, value, kv_cache, metadata, output) -> None:
    """Attention of the rows of trees; see `merge_tree` for shapes.

    Args:
        key, value: the step's own, which are in the KV cache already.
    """
    blocks = CPUBlocks(kv_cache, layer.isa)
    if (library := native.LIBRARY.loaded) is not None:
        native.attend(library, blocks, impl.scale, query, metadata, output)
    else:
        _attend(blocks, impl.scale, query, key, value, metadata, output)


def _attend(blocks, scale, query, key, value, metadata, output) -> None:
    """In PyTorch, request by request."""
    tree: TreeAttention = metadata.draft_tree
    starts = metadata.query_start_loc.tolist()
    for req in range(tree.num_reqs):
        rows = slice(starts[req], starts[req + 1])
        prefix = int(tree.rows.prefix_lens[req])
        at = torch.arange(prefix)
        table = metadata.block_table[req].long()
        slots = table[at // blocks.block_size] * blocks.block_size
        keys, values = blocks.read(slots + at % blocks.block_size)
        seen = torch.cat(
            [
                torch.ones(rows.stop - rows.start, prefix, dtype=torch.bool),
                rows_seen(tree, req, rows),
            ],
            dim=1,
        )
        # [1, heads, rows, D]
        q, k, v = (
            part.transpose(0, 1)[None]
            for part in (
                query[rows],
                torch.cat([keys, key[rows]]),
                torch.cat([values, value[rows]]),
            )
        )
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=seen, scale=scale, enable_gqa=True
        )
        output[rows] = out[0].transpose(0, 1).view_as(output[rows])


def rows_seen(tree: TreeAttention, req: int, rows: slice) -> torch.Tensor:
    """[rows, rows] bool, which queries of a request each of them attends to."""
    leading = int(tree.rows.num_leading[req])
    count = rows.stop - rows.start
    seen = torch.ones(count, count, dtype=torch.bool).tril()
    words = tree.rows.masks[rows.start + leading : rows.stop]
    node = torch.arange(count - leading)
    bits = words[:, (node // 64)] >> (node % 64)
    seen[leading:, leading:] = (bits & 1).bool()
    return seen


class CPUPathMover:
    """Like `kv_move.PathMover`, for the CPU backend's order of KV.

    Args:
        caches: the KV cache of each layer.
        groups: the KV group of each layer.
        isas: the instruction set of each layer.
    """

    def __init__(
        self,
        caches: Mapping[str, torch.Tensor],
        groups: Mapping[str, int],
        isas: Mapping[str, str],
    ):
        unique = {kv.data_ptr(): name for name, kv in caches.items()}
        self.layers = [
            (groups[name], CPUBlocks(caches[name], isas[name]))
            for name in unique.values()
        ]

    def __call__(
        self,
        slot_mappings: torch.Tensor,
        path: torch.Tensor,
        num_sampled: torch.Tensor,
        first_rows: torch.Tensor,
    ) -> None:
        """See `PathMover`."""
        step = slot_mappings, path, num_sampled, first_rows
        if (library := native.LIBRARY.loaded) is not None:
            native.move_paths(library, self.layers, *step)
        else:
            self._move(*step)

    def _move(self, slot_mappings, path, num_sampled, first_rows) -> None:
        depth = torch.arange(path.shape[1])
        moves = (depth < num_sampled[:, None]) & (path != depth)
        req, to = moves.nonzero(as_tuple=True)
        if not len(req):
            return
        first = first_rows[req].long()
        for group, blocks in self.layers:
            slots = slot_mappings[group]
            # All reads precede all writes: a source may be another's destination.
            blocks.move(slots[first + path[req, to]], slots[first + to])
