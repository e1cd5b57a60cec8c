# SPDX-License-Identifier: Apache-2.0
"""States of the target that a later step is fed, kept with the KV blocks.

A token that a step begins with is fed the state of the token before it, which an
earlier step computed, perhaps for another request with the same prefix. Blocks are
where all of them meet: each keeps the state of its last valid token so far.
"""

import torch

from vllm.triton_utils import tl, triton

from .structs import VerifiedBatch

PROGRAMS = 16  # per request, which share the blocks that it has tokens in
_TRASH = 1  # rows before those of blocks


class KeptStates:
    """What KV blocks keep; B is their number, H the width of a state.

    Attributes:
        states: [B, H], of the last valid token in a block. The null block's row is for
            tokens that have no state before them, or whose is not known.
        positions: [B] int64, of that token.
    """

    def __init__(self, num_blocks: int, block_size: int, no_state: torch.Tensor):
        """
        Args:
            block_size: tokens of a KV block.
            no_state: [H], what stands for no state.
        """
        self.block_size = block_size
        rows = _TRASH + num_blocks
        self._states = no_state.new_zeros(rows, len(no_state))
        self._positions = torch.full(
            (rows,), -1, dtype=torch.int64, device=no_state.device
        )
        self.states, self.positions = self._states[_TRASH:], self._positions[_TRASH:]
        self.states[0] = no_state

    @property
    def nbytes(self) -> int:
        return self._states.nbytes + self._positions.nbytes

    def keep(
        self,
        verified: VerifiedBatch,
        slots: torch.Tensor,
        states: torch.Tensor,
        native: bool = True,
    ) -> None:
        """Keeps what a step leaves in the blocks that it has valid tokens in.

        Done before the step is laid out: a request of the same step may go on from a
        prefix that this one computes. The null block's row stays: an engine that warms
        up while it serves has slots there.

        Args:
            slots: [T] int64, KV slots of the step's tokens.
            states: [T, H], theirs.
            native: on a CPU, run plain PyTorch instead of the kernel.
        """
        if native and states.device.type == "cpu":
            self._keep_on_cpu(verified, slots, states)
            return
        assert states.is_contiguous() and slots.is_contiguous()
        size = states.shape[1]
        _keep_states_kernel[(len(verified.idx_mapping), PROGRAMS)](
            verified,
            slots,
            states,
            self.states,
            self.positions,
            self.block_size,
            SIZE=size,
            BLOCK=triton.next_power_of_2(size),
        )

    def _keep_on_cpu(
        self, verified: VerifiedBatch, slots: torch.Tensor, states: torch.Tensor
    ) -> None:
        starts = verified.query_start_loc
        num_tokens = int(starts[-1])
        # Tokens that end a block, rejected ones too: what is kept of those is written
        # over before a request goes on behind them.
        ends = (slots[:num_tokens] + 1) % self.block_size == 0
        self._copy(torch.arange(num_tokens), slots, states, ends, verified)
        # Then the last valid token of each request.
        last = starts[1:] - 1 - verified.num_rejected
        is_real = starts[1:] > starts[:-1]
        self._copy(last, slots, states, is_real, verified)

    def _copy(
        self,
        rows: torch.Tensor,
        slots: torch.Tensor,
        states: torch.Tensor,
        mask: torch.Tensor,
        verified: VerifiedBatch,
    ) -> None:
        block = slots[rows] // self.block_size
        to = torch.where(mask & (block > 0), block + _TRASH, 0)
        self._states.index_copy_(0, to, states[rows])
        self._positions.index_copy_(0, to, verified.positions[rows])


@triton.jit
def _keep_states_kernel(
    verified,  # VerifiedBatch
    slots,
    states,
    kept_states,
    kept_positions,
    block_size,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Programs (request, i) keep every so manieth block that the request has valid
    tokens in, from its i-th on."""
    req = tl.program_id(0)
    begin = tl.load(verified.query_start_loc + req)
    end = tl.load(verified.query_start_loc + req + 1)
    if begin == end:
        return  # padding
    last = end - 1 - tl.load(verified.num_rejected + req)
    start = tl.load(verified.positions + begin)
    first_block = start // block_size
    num_blocks = (start + last - begin) // block_size - first_block + 1
    col = tl.arange(0, BLOCK)
    for i in range(tl.program_id(1), num_blocks, tl.num_programs(1)):
        end_of_block = begin + (first_block + i + 1) * block_size - 1 - start
        row = tl.minimum(end_of_block, last)
        block = tl.load(slots + row) // block_size
        if block > 0:
            state = tl.load(states + row * SIZE + col, mask=col < SIZE)
            tl.store(kept_states + block * SIZE + col, state, mask=col < SIZE)
            tl.store(kept_positions + block, start + row - begin)
