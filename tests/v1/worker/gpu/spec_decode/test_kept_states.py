# SPDX-License-Identifier: Apache-2.0
"""What KV blocks keep of the target's states, in Triton and in plain PyTorch."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm.platforms import current_platform

if current_platform.is_cpu():
    import vllm.v1.worker.cpu.shm  # noqa: F401  (what Runner V2 needs on a CPU)

from vllm.v1.worker.gpu.spec_decode.unified.kept_states import KeptStates
from vllm.v1.worker.gpu.spec_decode.unified.structs import VerifiedBatch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BLOCK, NUM_BLOCKS, WIDTH = 4, 40, 3


def make(*values: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=DEVICE)


class Step:
    """Requests of (first position, tokens, rejected), each with blocks of its own.

    The state of row i is i + 1; padding has no tokens.
    """

    def __init__(self, requests: list[tuple[int, int, int]], num_padded: int = 0):
        starts, positions, slots = [0], [], []
        for number, (start, count, _) in enumerate(requests):
            first = 1 + number * 10  # KV block
            positions += range(start, start + count)
            slots += [first * BLOCK + p for p in range(start, start + count)]
            starts.append(len(positions))
        starts += [len(positions)] * num_padded
        rejected = [r for *_, r in requests] + [0] * num_padded
        none, n = make(0), len(rejected)
        self.verified = VerifiedBatch(
            none, make(*positions), make(*starts, dtype=torch.int32), make(*range(n)),
            none, make(*rejected, dtype=torch.int32), none, none, none, none,
        )  # fmt: skip
        self.slots = make(*slots)
        rows = torch.arange(1.0, 1 + len(slots), device=DEVICE)
        self.states = rows[:, None].repeat(1, WIDTH)


@pytest.fixture(scope="module", params=["triton", "native"])
def keep(request):
    """Does a step, with each implementation."""
    native = request.param == "native"
    if native and DEVICE.type != "cpu":
        pytest.skip("it is for tensors on a CPU")

    def run(kept: KeptStates, step: Step) -> None:
        kept.keep(step.verified, step.slots, step.states, native=native)

    return run


def fresh() -> KeptStates:
    return KeptStates(NUM_BLOCKS, BLOCK, torch.full((WIDTH,), -5.0, device=DEVICE))


def described(kept: KeptStates) -> dict[int, tuple[float, int]]:
    """State and position that each block keeps, if it keeps one."""
    rows = zip(kept.states.tolist(), kept.positions.tolist(), strict=True)
    found = {block: (state[0], at) for block, (state, at) in enumerate(rows)}
    return {block: row for block, row in found.items() if row[0]}


def test_of_the_last_valid_token_of_each_block(keep):
    kept = fresh()
    keep(kept, Step([(2, 7, 0), (5, 2, 1), (0, 1, 0)], num_padded=2))
    assert described(kept) == {
        0: (-5.0, -1),
        1: (2.0, 3), 2: (6.0, 7), 3: (7.0, 8),  # positions 2 to 8
        12: (8.0, 5),  # position 5 alone: 6 was rejected
        21: (10.0, 0),
    }  # fmt: skip


def test_a_rejected_end_of_a_block_does_not_take_its_place(keep):
    kept = fresh()
    keep(kept, Step([(1, 3, 2)]))
    assert described(kept)[1] == (1.0, 1)
    # The request goes on behind the valid token, and ends the block.
    keep(kept, Step([(2, 2, 0)]))
    assert described(kept)[1] == (2.0, 3)


def test_padding_and_the_null_block_keep_nothing(keep):
    """An engine that warms up while it serves has slots in the null block."""
    for slots in (make(*[-1] * 8), make(*[0, 1, 2, 3] * 2)):
        kept, step = fresh(), Step([(0, 8, 0)])
        step.slots = slots
        keep(kept, step)
        assert described(kept) == {0: (-5.0, -1)}


steps = st.tuples(st.integers(0, 9), st.integers(1, 12), st.integers(0, 11))


@settings(deadline=None, max_examples=50)
@given(st.lists(steps, min_size=1, max_size=3), st.integers(0, 2))
def test_as_defined(keep, requests, num_padded: int):
    requests = [(start, q, min(rejected, q - 1)) for start, q, rejected in requests]
    kept, row = fresh(), 0
    keep(kept, Step(requests, num_padded))
    found = described(kept)
    for number, (start, count, rejected) in enumerate(requests):
        ends = {}
        for i in range(count - rejected):
            ends[1 + number * 10 + (start + i) // BLOCK] = (1.0 + row + i, start + i)
        assert ends.items() <= found.items()
        row += count
