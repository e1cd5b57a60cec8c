# SPDX-License-Identifier: Apache-2.0
"""What the drafter goes on from after a step with trees."""

import numpy as np
import torch

from vllm.platforms import current_platform
from vllm.v1.attention.backends.utils import PAD_SLOT_ID
from vllm.v1.worker.gpu.input_batch import InputBatch, InputBuffers
from vllm.v1.worker.gpu.spec_decode.draft_tree.accepted import (
    TargetStep,
    accepted_rows,
)

DEVICE = torch.device("cpu" if current_platform.is_cpu() else "cuda")
K, N = 3, 6


def tensor(values, dtype=torch.int32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def make_step(
    drafts: np.ndarray,
    leading: np.ndarray,
    rejected: torch.Tensor,
    counts: np.ndarray | None = None,
) -> tuple[TargetStep, np.ndarray]:
    """Of requests with so many drafts, and known tokens before their last one.

    Args:
        counts: of the drafts, those that are verified, which only the device knows.

    Returns:
        The step, and where its requests begin.
    """

    def bounds(sizes) -> np.ndarray:
        return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)

    queries = (1 + drafts + leading).astype(np.int32)
    verified = drafts if counts is None else counts
    starts = bounds(1 + verified + leading)
    rows, n = int(starts[-1]), len(drafts)
    batch = InputBatch.make_dummy(n, rows, InputBuffers(n, rows, DEVICE))
    batch.num_scheduled_tokens, batch.num_draft_tokens_per_req = queries, drafts
    batch.query_start_loc = tensor(starts)
    batch.cu_num_logits = tensor(bounds(verified + 1))
    batch.input_ids = tensor(range(100, 100 + rows))
    batch.positions = tensor(range(500, 500 + rows), torch.int64)
    batch.max_query_len = None if counts is None else int(queries.max())
    # Behind the batch there is none to be read.
    slots = tensor([range(0, rows), range(1000, 1000 + rows)], torch.int64)
    hidden = torch.arange(rows, device=DEVICE)[:, None] * 1.0
    return TargetStep(batch, rejected, hidden, [hidden + 1], slots), starts


def test_a_tree_shrinks_to_its_accepted_rows():
    # A tree; one whose drafts were cut; one behind known tokens; a prompt.
    drafts, leading = np.array([N, 2, N, 0]), np.array([0, 0, 2, 4])
    path = tensor([[0, 4, 5, 0], [0, 2, 0, 0], [0, 1, 2, 6], [0, 0, 0, 0]])
    rejected = tensor([N + 1 - 3, 3 - 2, N + 1 - 4, 0])
    step, starts = make_step(drafts, leading, rejected)
    found = accepted_rows(step, K, path)

    kept = [K + 1, 3, 2 + K + 1, 5]
    assert found.batch.num_scheduled_tokens.tolist() == kept
    assert found.batch.num_tokens == sum(kept)
    assert found.batch.query_start_loc.tolist() == [0, *np.cumsum(kept)]
    valid = [3, 2, 2 + 4, 5]
    assert found.num_rejected.tolist() == [
        a - b for a, b in zip(kept, valid, strict=True)
    ]
    rows = [[0, 4, 5], [0, 2], [0, 1, 2, 3, 4, 8], [0, 1, 2, 3, 4]]
    begin = 0
    for req, wanted in enumerate(rows):
        own = slice(begin, begin + len(wanted))
        begin += kept[req]
        at = [starts[req] + row for row in wanted]
        assert found.last_hidden[own, 0].tolist() == at
        assert found.aux_hidden[0][own, 0].tolist() == [row + 1 for row in at]
        assert found.batch.input_ids[own].tolist() == [100 + row for row in at]
        assert found.batch.positions[own].tolist() == [500 + row for row in at]
        first = [starts[req] + i for i in range(len(wanted))]
        assert found.slot_mappings[0, own].tolist() == first
        assert found.slot_mappings[1, own].tolist() == [1000 + i for i in first]


def test_trees_of_a_budget_shrink_to_equally_many_rows():
    """Defect: slots of the next request, or behind the batch, for rows not verified."""
    drafts, counts = np.full(4, N), np.array([N, 2, 0, 1])
    path = tensor([[0, 4, 5, 0], [0, 2, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]])
    num_sampled = tensor([3, 2, 1, 1])
    rejected = tensor(counts + 1) - num_sampled
    step, starts = make_step(drafts, 0 * drafts, rejected, counts)
    found = accepted_rows(step, K, path)
    batch = found.batch
    assert batch.num_scheduled_tokens.tolist() == [K + 1] * 4
    assert batch.query_start_loc.tolist() == [*range(0, 4 * (K + 1) + 1, K + 1)]
    assert batch.max_query_len is None  # equally long ones have graphs
    assert (K + 1 - found.num_rejected).tolist() == num_sampled.tolist()
    for req, accepted in enumerate(([0, 4, 5], [0, 2], [0], [0])):
        begin, first = req * (K + 1), starts[req]
        own = slice(begin, begin + len(accepted))
        at = [first + row for row in accepted]
        assert found.last_hidden[own, 0].tolist() == at
        assert batch.input_ids[own].tolist() == [100 + row for row in at]
        assert batch.positions[own].tolist() == [500 + row for row in at]
        there = [i if i <= counts[req] else None for i in range(K + 1)]
        slots = [PAD_SLOT_ID if i is None else first + i for i in there]
        of_request = slice(begin, begin + K + 1)
        assert found.slot_mappings[0, of_request].tolist() == slots
