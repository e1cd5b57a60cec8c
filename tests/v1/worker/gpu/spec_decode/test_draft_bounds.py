# SPDX-License-Identifier: Apache-2.0
"""Host and device agree on where each request's slots begin, rejected ones included."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from vllm.platforms import current_platform

if current_platform.is_cpu():
    import vllm.v1.worker.cpu.shm  # noqa: F401  (what Runner V2 needs on a CPU)

from vllm.v1.worker.gpu.block_table import BlockTables
from vllm.v1.worker.gpu.spec_decode.unified.buffers import DraftBuffers
from vllm.v1.worker.gpu.spec_decode.unified.inputs import (
    PreviousPass,
    VerifiedBatch,
    prepare_inputs,
)
from vllm.v1.worker.gpu.spec_decode.unified.layout import DraftLayout
from vllm.v1.worker.gpu.spec_decode.unified.plan import draft_plans
from vllm.v1.worker.gpu.spec_decode.unified.shapes import StepShapes

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
STARTS, REJECTED = [0, 8, 9, 14], [5, 0, 3]


def int32(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def int64(values: list) -> torch.Tensor:
    return torch.tensor(values, device=DEVICE)


@pytest.fixture
def batch() -> VerifiedBatch:
    """Three requests of 8, 1 and 5 tokens."""
    return VerifiedBatch(
        input_ids=int32([*range(14)]),
        positions=int64([*range(20, 28), *range(1), *range(5)]),
        query_start_loc=int32(STARTS),
        idx_mapping=int64([0, 1, 2]),
        num_sampled=int32([3, 0, 2]),
        num_rejected=int32(REJECTED),
        last_sampled=int64([[1]] * 4),
        next_prefill_tokens=int32([7] * 4),
        temperature=torch.zeros(4, device=DEVICE),
        seeds=int64([0] * 4),
    )


@pytest.mark.parametrize("shift, width", [(0, 1), (0, 3), (0, 7), (1, 1), (1, 4)])
def test_bounds(batch: VerifiedBatch, shift: int, width: int):
    layout = DraftLayout(7, shift, width)
    told = SimpleNamespace(
        num_reqs=3,
        num_tokens=STARTS[-1],
        query_start_loc_np=np.array(STARTS, dtype=np.int32),
        num_scheduled_tokens=np.diff(STARTS),
        decode_graph_eligible=False,
    )
    plan = draft_plans(layout, [7], 4, DEVICE)[7]
    shapes = StepShapes(None, 0, sync=None, fits_graphs=True, max_verified=8)
    first, later = shapes.first(told, plan), shapes.later(3, plan)

    buffers, tables = (
        DraftBuffers(layout, 64, 4, DEVICE),
        BlockTables([16], 4, 64, [4], DEVICE),
    )
    buffers.allocate_kv_groups(1)
    source, shapes = batch, [first] + [later] * (layout.num_passes - 1)
    for draft_pass, shape in enumerate(shapes):
        if draft_pass:
            tokens = int64([[1] * 7] * 3)
            source = PreviousPass(tokens, draft_pass)
        prepare_inputs(
            source, layout, buffers, tables, num_samples=1, limit=64,
            num_padded_tokens=shape.num_tokens,
        )  # fmt: skip
        assert (
            buffers.batch.query_start_loc[:4].tolist() == shape.query_start_loc.tolist()
        )
        assert int(buffers.batch.query_start_loc[-1]) == shape.num_tokens
