# SPDX-License-Identifier: Apache-2.0
"""Target hidden states kept by KV cache block."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm.v1.worker.gpu.spec_decode.unified.drafters.pard2 import KeptStates

from .batches import DEVICE, int32, int64, verified_batch

BLOCK, NUM_BLOCKS, WIDTH = 4, 40, 3


class Step:
    """Requests of (first position, tokens, rejected), each with its own blocks.

    The hidden state of row i is i + 1; padding has no tokens.
    """

    def __init__(self, requests: list[tuple[int, int, int]], num_padded: int = 0):
        starts, counts, rejected = map(list, zip(*requests, strict=True))
        pad = [0] * num_padded
        self.verified = verified_batch(
            counts + pad, starts + pad, num_rejected=int32(rejected + pad)
        )
        # Each has its own ten KV blocks, from block 1 on.
        first = torch.arange(len(starts)).repeat_interleave(torch.tensor(counts)) * 10
        self.slots = (1 + first.to(DEVICE)) * BLOCK + self.verified.positions
        rows = torch.arange(1.0, 1 + len(self.slots), device=DEVICE)
        self.states = rows[:, None].repeat(1, WIDTH)


def keep(kept: KeptStates, step: Step) -> None:
    for ends in (True, False):
        kept.keep(step.verified, step.slots, step.states, ends)


def fresh() -> KeptStates:
    return KeptStates(NUM_BLOCKS, BLOCK, torch.full((WIDTH,), -5.0, device=DEVICE))


def described(kept: KeptStates) -> dict[tuple[int, str], tuple[float, int]]:
    """State and position that each block keeps for its end and for its last token."""
    rows = zip(kept.states.tolist(), kept.positions.tolist(), strict=True)
    return {
        (row // 2, "last" if row % 2 else "end"): (state[0], at)
        for row, (state, at) in enumerate(rows)
        if state[0]
    }


NOTHING = {(0, "end"): (-5.0, -1)}


def test_preceding_state_is_available_while_preparing_inputs():
    """Also if the step fills the block of the preceding token."""
    kept, step = fresh(), Step([(2, 2, 0)])
    keep(kept, Step([(0, 2, 0)]))
    kept.keep(step.verified, step.slots, step.states, ends=True)
    both = {(1, "last"): (2.0, 1), (1, "end"): (2.0, 3)}
    assert described(kept) == NOTHING | both


def test_padding_dummies_and_null_block_keep_nothing():
    """Warm-up runs while serving have slots in the null block."""
    for slots in (int64([-1] * 8), int64([0, 1, 2, 3] * 2)):
        kept, step = fresh(), Step([(0, 8, 0)])
        step.slots = slots
        keep(kept, step)
        assert described(kept) == NOTHING
    kept, step = fresh(), Step([(0, 8, 0)])
    step.verified = step.verified._replace(idx_mapping=int64([-1]))
    keep(kept, step)
    assert described(kept) == NOTHING


steps = st.tuples(st.integers(0, 9), st.integers(1, 12), st.integers(0, 11))


@settings(deadline=None, max_examples=50)
@given(st.lists(steps, min_size=1, max_size=3), st.integers(0, 2))
def test_matches_definition(requests, num_padded: int):
    requests = [(start, q, min(rejected, q - 1)) for start, q, rejected in requests]
    kept, wanted, row = fresh(), dict(NOTHING), 1.0
    keep(kept, Step(requests, num_padded))
    for number, (start, count, rejected) in enumerate(requests):
        for i in range(count - rejected):
            at, block = start + i, 1 + number * 10 + (start + i) // BLOCK
            if at % BLOCK == BLOCK - 1:
                wanted[block, "end"] = (row + i, at)
        wanted[block, "last"] = (row + i, at)
        row += count
    assert described(kept) == wanted
