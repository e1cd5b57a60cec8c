# SPDX-License-Identifier: Apache-2.0
"""Keys of random numbers: fresh wherever a draw must not know of an earlier one."""

import random

import pytest
import torch

from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample
from vllm.v1.worker.gpu.spec_decode.noise import (
    DRAFT_SALT,
    draft_keys,
    draw_alone,
    verify_keys,
)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
MOST = 5


def steps_of_a_request(block: bool, seed: int, start: int = 40):
    """For each step its keys of drafts and of verification, and how many it used."""
    chance = random.Random(seed)
    for _ in range(200):
        count = chance.randint(1, MOST)
        columns = torch.arange(count + 1, dtype=torch.int32)
        positions = start + columns.long()
        drafted = draft_keys(positions[:-1], columns[:-1], MOST, block) + DRAFT_SALT
        verified = verify_keys(positions, columns, MOST, block)
        accepted = chance.randint(0, count)
        yield drafted.tolist(), verified.tolist(), accepted
        start += accepted + 1


@pytest.mark.parametrize("block", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_no_draw_meets_noise_that_decided_before(block: bool, seed: int):
    """Token by token, drafts past a rejected one decide nothing; in a block they do."""
    decided: set[int] = set()
    for drafted, verified, accepted in steps_of_a_request(block, seed):
        assert decided.isdisjoint(drafted)
        assert decided.isdisjoint(verified)
        assert set(drafted).isdisjoint(verified)
        looked_at = len(verified) if block else accepted + 1
        decided.update(drafted[:looked_at], verified[:looked_at])


def test_unless_verified_as_a_block_drafts_share_the_targets_noise():
    positions = torch.tensor([7, 8, 131071])
    columns = torch.tensor([0, 1, 4], dtype=torch.int32)
    keys = draft_keys(positions, columns, MOST, block=False)
    assert torch.equal(keys + DRAFT_SALT, positions)


@pytest.fixture
def where_kernels_run():
    """Tensors are made there."""
    with DEVICE:
        yield


def test_draws_are_the_targets_as_far_as_drafts_foresaw_them(where_kernels_run):
    """Four requests: all drafts right, the second wrong, one not valid, and none."""
    torch.manual_seed(0)
    lengths, vocab = [4, 4, 3, 1], 11
    ends = torch.tensor([0, *lengths]).cumsum(0).int()
    rows = int(ends[-1])
    logits = torch.randn(rows, vocab)
    states = torch.repeat_interleave(torch.tensor([2, 0, 3, 1]), torch.tensor(lengths))
    positions = torch.arange(rows)
    temperature = torch.tensor([1.0, 0.0, 0.7, 1.0])
    seeds = torch.tensor([5, 6, 7, 8])
    alone = gumbel_sample(
        logits, states, temperature, seeds, positions, False, is_drafting=False
    )
    drafts = alone.roll(1).int()
    drafts[4 + 2] = (drafts[4 + 2] + 1) % vocab
    drafts[8 + 1] = -1
    tokens, count = draw_alone(
        logits, drafts, positions, ends, states, temperature, seeds, 5, False
    )
    assert count.tolist() == [4, 2, 1, 1]
    for begin, found, number in zip(ends, tokens, count, strict=False):
        assert torch.equal(found[:number], alone[begin : begin + number])
