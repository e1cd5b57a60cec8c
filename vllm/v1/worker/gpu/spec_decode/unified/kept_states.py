# SPDX-License-Identifier: Apache-2.0
"""Hidden states of the target for later steps, kept by KV cache block.

The first token of a step takes the hidden state of the preceding token, which an
earlier step computed, perhaps for another request with the same prefix. KV cache blocks
are what these steps share. Each block keeps two states: that of the token that ends it,
for any request that continues after it, and that of its last valid token so far, for
the request that continues within it. A KV connector loads blocks without any.
"""

import numpy as np
import torch

from vllm.triton_utils import tl, triton

from .structs import VerifiedBatch

PROGRAMS = 16  # per request; they share the blocks that it fills


class KeptStates:
    """The states of KV blocks; B is the number of blocks, H the width of a state.

    Attributes:
        states: [2 * B, H]. Row 2 * b is of the token that ends block b, row 2 * b + 1
            of the block's last token so far. Row 0, the null block's, is for tokens
            without a preceding state, or whose preceding state is not known.
        positions: [2 * B] int64, of those tokens; -1 if there is none.
    """

    def __init__(self, num_blocks: int, block_size: int, no_state: torch.Tensor):
        """
        Args:
            block_size: tokens of a KV block.
            no_state: [H], taken where there is no state.
        """
        self.block_size = block_size
        self.states = no_state.new_zeros(2 * num_blocks, len(no_state))
        self.states[0] = no_state
        self.positions = torch.full(
            (2 * num_blocks,), -1, dtype=torch.int64, device=no_state.device
        )

    @property
    def nbytes(self) -> int:
        return self.states.nbytes + self.positions.nbytes

    def keep(
        self,
        verified: VerifiedBatch,
        slots: torch.Tensor,
        states: torch.Tensor,
        *,
        ends: bool,
        native: bool = True,
    ) -> None:
        """Keeps the states of a step, in the blocks of its valid tokens.

        A request may continue a prefix that another one computes in the same step, so
        states that end blocks are kept before the draft inputs are prepared. The others
        are read while these are prepared, and replaced afterwards.

        Args:
            slots: [at least T] int64, KV slots of the step's tokens. Those of the null
                block keep nothing: warm-up runs while serving have slots there.
            states: [at least T, H], of these tokens.
            ends: keep the states that end blocks; else those of last tokens.
            native: on a CPU, run plain PyTorch instead of the kernel.
        """
        if native and states.device.type == "cpu":
            self._keep_on_cpu(verified, slots, states, ends)
            return
        assert states.is_contiguous() and slots.is_contiguous()
        size = states.shape[1]
        _keep_states_kernel[(len(verified.idx_mapping), PROGRAMS if ends else 1)](
            verified,
            slots,
            states,
            self.states,
            self.positions,
            self.block_size,
            ENDS=ends,
            SIZE=size,
            BLOCK=triton.next_power_of_2(size),
        )

    def _keep_on_cpu(
        self,
        verified: VerifiedBatch,
        slots: torch.Tensor,
        states: torch.Tensor,
        ends: bool,
    ) -> None:
        # NumPy's calls of a few elements take a tenth of PyTorch's.
        starts, positions = verified.query_start_loc.numpy(), verified.positions.numpy()
        first, lens = starts[:-1], np.diff(starts)
        valid = lens - verified.num_rejected.numpy()
        behind = first + np.where(verified.idx_mapping.numpy() >= 0, valid, 0)
        kv_slots = slots.numpy()
        if ends:
            rows = np.flatnonzero((kv_slots[: starts[-1]] + 1) % self.block_size == 0)
            rows = rows[rows < behind[np.searchsorted(first, rows, "right") - 1]]
        else:
            rows = behind[behind > first] - 1
        blocks = kv_slots[rows] // self.block_size
        rows, blocks = rows[blocks > 0], blocks[blocks > 0]
        if len(rows):
            to = 2 * blocks + (not ends)
            self.positions.numpy()[to] = positions[rows]
            kept = states.index_select(0, torch.from_numpy(rows))
            self.states.index_copy_(0, torch.from_numpy(to), kept)


@triton.jit
def _keep_states_kernel(
    verified,  # VerifiedBatch
    slots,
    states,
    kept_states,
    kept_positions,
    block_size,
    ENDS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (r, i) keeps every PROGRAMS-th block end of request r, from the i-th."""
    req = tl.program_id(0)
    begin = tl.load(verified.query_start_loc + req)
    end = tl.load(verified.query_start_loc + req + 1)
    if (begin == end) | (tl.load(verified.idx_mapping + req) < 0):
        return  # padding, or a dummy
    last = end - 1 - tl.load(verified.num_rejected + req)
    start = tl.load(verified.positions + begin)
    col = tl.arange(0, BLOCK)
    first_block, count = start // block_size, 1
    if ENDS:
        count = (start + last - begin + 1) // block_size - first_block
    for i in range(tl.program_id(1), count, tl.num_programs(1)):
        row = last.to(tl.int64)
        if ENDS:
            row = begin + (first_block + i + 1) * block_size - 1 - start
        block = tl.load(slots + row) // block_size
        if block > 0:
            to = 2 * block
            if not ENDS:
                to += 1
            state = tl.load(states + row * SIZE + col, mask=col < SIZE)
            tl.store(kept_states + to * SIZE + col, state, mask=col < SIZE)
            tl.store(kept_positions + to, start + row - begin)
