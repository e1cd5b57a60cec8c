# SPDX-License-Identifier: Apache-2.0
"""Moves the KV of an accepted path to the slots of its positions.

Node i's KV was written to slot p + i, since nodes of the same depth share a position.
The d-th node of the accepted path belongs in slot p + d. One launch moves it in all
layers; if the path is the chain, nothing is moved.
"""

from collections.abc import Mapping

import torch

from vllm.triton_utils import tl, triton

# Columns of the table: address, KV group, slots per block, strides of block, head and
# slot, KV heads, words per head and slot. Strides are in words of 32 bits.
COLUMNS = 8


@triton.jit(do_not_specialize=["slot_stride"])
def _move_path_kernel(
    layers,  # [L, COLUMNS] int64
    slot_mappings,  # [G, T] int64
    slot_stride,
    path,  # [n, K + 1] int32
    num_sampled,  # [n] int32
    first_rows,  # [n] int32, row 0 of each request in the batch
    DEPTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    req, layer, head = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    at = layers + layer * COLUMNS
    if head >= tl.load(at + 6):
        return
    cache = tl.load(at).to(tl.pointer_type(tl.int32)) + head * tl.load(at + 4)
    size, block_stride, stride = tl.load(at + 2), tl.load(at + 3), tl.load(at + 5)
    slots = slot_mappings + tl.load(at + 1) * slot_stride + tl.load(first_rows + req)
    word = tl.arange(0, BLOCK)
    inside = word < tl.load(at + 7)
    accepted = tl.load(num_sampled + req) - 1
    # From the root on: a node's slot is that of its depth or a later one, so none is
    # overwritten before it has been read. Each thread moves words of its own.
    for depth in range(1, DEPTH + 1):
        is_on = depth <= accepted
        row = tl.load(path + req * (DEPTH + 1) + depth, mask=is_on, other=depth)
        moves = is_on & (row != depth)
        source = tl.load(slots + row, mask=moves, other=0)
        to = tl.load(slots + depth, mask=moves, other=0)
        source = source // size * block_stride + source % size * stride
        to = to // size * block_stride + to % size * stride
        words = tl.load(cache + source + word, mask=inside & moves, other=0)
        tl.store(cache + to + word, words, mask=inside & moves)


class PathMover:
    """Moves KV in the cache of each layer: [blocks, heads, slots, K and V of a head].

    Args:
        caches: the KV cache of each layer, in the layout that FlashAttention reads.
        groups: the KV group of each layer.
    """

    def __init__(self, caches: Mapping[str, torch.Tensor], groups: Mapping[str, int]):
        # Layers that share a cache count once.
        unique = {cache.data_ptr(): name for name, cache in caches.items()}
        rows = [self._row(caches[name], groups[name]) for name in unique.values()]
        device = next(iter(caches.values())).device
        self.layers = torch.tensor(rows, dtype=torch.int64, device=device)
        self.max_heads = max(row[6] for row in rows)
        self.block = triton.next_power_of_2(max(row[7] for row in rows))

    @staticmethod
    def _row(cache: torch.Tensor, group: int) -> list[int]:
        words = cache.view(torch.int32)
        _, heads, slots, width = words.shape
        block, head, slot, one = words.stride()
        assert one == 1
        return [cache.data_ptr(), group, slots, block, head, slot, heads, width]

    def __call__(
        self,
        slot_mappings: torch.Tensor,
        path: torch.Tensor,
        num_sampled: torch.Tensor,
        first_rows: torch.Tensor,
    ) -> None:
        """Moves the accepted path of each request, in every layer.

        Args:
            slot_mappings: [G, T] int64, KV slot of each row of the batch.
            path: [n, K + 1] int32, row of each accepted node, from row 0 on.
            num_sampled: [n] int32, accepted nodes and the bonus token.
            first_rows: [n] int32, row 0 of each request in the batch.
        """
        num_reqs, width = path.shape
        _move_path_kernel[(num_reqs, len(self.layers), self.max_heads)](
            self.layers,
            slot_mappings,
            slot_mappings.stride(0),
            path,
            num_sampled,
            first_rows,
            DEPTH=width - 1,
            COLUMNS=COLUMNS,
            BLOCK=self.block,
            num_warps=1,
        )
