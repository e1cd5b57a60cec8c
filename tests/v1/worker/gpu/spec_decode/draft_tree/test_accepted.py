# SPDX-License-Identifier: Apache-2.0
"""The rows from which the drafter continues after a step with trees."""

import numpy as np
import torch

from vllm.v1.worker.gpu.input_batch import InputBatch, InputBuffers
from vllm.v1.worker.gpu.spec_decode.unified.inputs import TargetStep
from vllm.v1.worker.gpu.spec_decode.unified.tree.accept import accepted_rows

from ..batches import DEVICE
from .test_kernels import tensor

K, N = 3, 6


def test_tree_shrinks_to_accepted_rows():
    # A tree; one with fewer drafts; one after known tokens; a prompt.
    drafts, leading = np.array([N, 2, N, 0]), np.array([0, 0, 2, 4])
    queries = (1 + drafts + leading).astype(np.int32)
    starts = np.concatenate([[0], queries.cumsum()]).astype(np.int32)
    buffers = InputBuffers(4, int(starts[-1]), DEVICE)
    batch = InputBatch.make_dummy(4, int(starts[-1]), buffers)
    batch.num_scheduled_tokens, batch.num_draft_tokens_per_req = queries, drafts
    batch.query_start_loc = tensor(starts)
    batch.cu_num_logits = tensor(np.concatenate([[0], (drafts + 1).cumsum()]))
    batch.input_ids = tensor(range(100, 100 + starts[-1]))
    batch.positions = tensor(range(500, 500 + starts[-1]), torch.int64)
    slots = tensor([range(0, 30), range(1000, 1030)], torch.int64)
    path = tensor([[0, 4, 5, 0], [0, 2, 0, 0], [0, 1, 2, 6], [0, 0, 0, 0]])
    rejected = tensor([N + 1 - 3, 3 - 2, N + 1 - 4, 0])

    hidden = torch.arange(starts[-1], device=DEVICE)[:, None] * 1.0
    rope = torch.arange(starts[-1], device=DEVICE).repeat(3, 1)
    given = rejected, slots, hidden, [hidden + 1]
    step = TargetStep(batch, None, *given, rope_positions=rope)
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
        assert found.rope_positions[:, own].tolist() == [at] * 3
        assert found.aux_hidden[0][own, 0].tolist() == [row + 1 for row in at]
        assert found.batch.input_ids[own].tolist() == [100 + row for row in at]
        assert found.batch.positions[own].tolist() == [500 + row for row in at]
        first = [starts[req] + i for i in range(len(wanted))]
        assert found.slot_mappings[0, own].tolist() == first
        assert found.slot_mappings[1, own].tolist() == [1000 + i for i in first]
