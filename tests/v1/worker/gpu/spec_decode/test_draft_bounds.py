# SPDX-License-Identifier: Apache-2.0
"""Host and device agree on where each request's slots begin, with rejected tokens."""

from types import SimpleNamespace

import numpy as np
import pytest

from vllm.v1.worker.gpu.spec_decode.unified.graphs import StepShapes
from vllm.v1.worker.gpu.spec_decode.unified.inputs import DraftInputs, PreviousPass
from vllm.v1.worker.gpu.spec_decode.unified.layout import DraftLayout, draft_plans

from .batches import DEVICE, block_tables, int32, int64, prepare_inputs, verified_batch

STARTS = [0, 8, 9, 14]
# What the host knows of the batch.
TOLD = SimpleNamespace(
    num_reqs=3,
    num_tokens=STARTS[-1],
    query_start_loc_np=np.array(STARTS, dtype=np.int32),
    num_scheduled_tokens=np.diff(STARTS),
    decode_graph_eligible=False,
    num_draft_tokens_per_req=None,
)


@pytest.mark.parametrize("shift, width", [(0, 1), (0, 3), (0, 7), (1, 1), (1, 4)])
def test_query_start_loc_of_host_and_device(shift: int, width: int):
    """Three requests of 8, 1 and 5 tokens."""
    layout = DraftLayout(7, shift, width)
    plan = draft_plans(layout, {7: 7}, 4, DEVICE)[7]
    shapes = StepShapes(None, 0, sync=None, fits_graphs=True, max_verified=8)
    first, later = shapes.first(TOLD, plan), shapes.later(3, plan)
    source = verified_batch(
        [8, 1, 5], [20, 0, 0], 4,
        num_sampled=int32([3, 0, 2]), num_rejected=int32([5, 0, 3]),
    )  # fmt: skip
    buffers, tables = DraftInputs(layout, 64, 4, DEVICE), block_tables([0] * 4, 4)
    buffers.allocate_kv_groups(1)
    for draft_pass, shape in enumerate([first] + [later] * (layout.num_passes - 1)):
        if draft_pass:
            source = PreviousPass(int64([[1] * 7] * 3), draft_pass)
        prepare_inputs(
            source, layout, buffers, tables, num_samples=1, limit=64,
            num_padded_tokens=shape.num_tokens,
        )  # fmt: skip
        starts = buffers.batch.query_start_loc
        assert starts[:4].tolist() == shape.query_start_loc.tolist()
        assert int(starts[-1]) == shape.num_tokens
