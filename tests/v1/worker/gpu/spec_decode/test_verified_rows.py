# SPDX-License-Identifier: Apache-2.0
"""Rows of rejected drafts are left out of draft passes on a CPU, and nothing else."""

from types import SimpleNamespace

import pytest
import torch

from vllm.v1.worker.gpu.spec_decode.unified.backlog import DraftInput
from vllm.v1.worker.gpu.spec_decode.unified.verified_rows import (
    MIN_REJECTED,
    knows_rejected,
    without_rejected,
)

from .batches import DEVICE, int32
from .test_backlog import described, given

pytestmark = pytest.mark.skipif(DEVICE.type != "cpu", reason="of a CPU")

# Of 4 rows of request state 5, the last 3 were rejected, and so on.
ROWS = {5: [9, 10, 11, 12], 2: [30, 31, 32, 33], 7: [0, 1, 2], 3: [7, 8, 9, 10]}


def rejecting(counts: list[int]) -> DraftInput:
    step, verified, hidden = given(ROWS, drafts=True)
    rejected = int32(counts)
    step = step._replace(num_rejected=rejected)
    return DraftInput(step, verified._replace(num_rejected=rejected), hidden)


def test_rejected_rows_are_left_out():
    step = rejecting([3, 2, 0, 3])
    found = without_rejected(step)
    assert described(found) == {5: [9], 2: [30, 31], 7: [0, 1, 2], 3: [7]}
    assert torch.equal(found.verified.num_sampled, step.verified.num_sampled)
    assert found.step.batch.num_scheduled_tokens.tolist() == [1, 2, 3, 1]


def test_a_few_rejected_rows_are_not_worth_it():
    step = rejecting([3, 2, 0, MIN_REJECTED - 6])
    assert without_rejected(step) is step


@pytest.mark.parametrize(
    "device, embeddings, rope_dims, knows",
    [
        ("cpu", False, 0, True),
        ("cuda", False, 0, False),
        ("cpu", True, 0, False),
        ("cpu", False, 3, False),
    ],
)
def test_where_rows_can_be_left_out(
    device: str, embeddings: bool, rope_dims: int, knows: bool
):
    drafter = SimpleNamespace(takes_embeddings=embeddings, rope_dims=rope_dims)
    assert knows_rejected(drafter, torch.device(device)) is knows
