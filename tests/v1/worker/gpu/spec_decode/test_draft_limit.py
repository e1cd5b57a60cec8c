# SPDX-License-Identifier: Apache-2.0
"""Past the drafter's context drafts are not accepted, and passes are skipped."""

from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from vllm.config.drafter import DrafterConfig
from vllm.v1.worker.gpu.dp_utils import DPSyncState
from vllm.v1.worker.gpu.spec_decode.unified.inputs import DraftLimits
from vllm.v1.worker.gpu.spec_decode.unified.speculator import UnifiedSpeculator
from vllm.v1.worker.gpu.spec_decode.verification import with_past_context

CONTEXT, MAX_MODEL_LEN, K = 32, 200, 3


@pytest.mark.parametrize("by_grammar", [None, [0, 1, 0, 0, 0, 0]])
def test_drafts_past_context_are_not_verified(by_grammar: list[int] | None):
    """Two requests with two drafts each; their first rows hold no draft."""
    batch = SimpleNamespace(
        positions=torch.tensor([0, 30, 31, 32, 0, 40, 41, 42]),
        logits_indices=torch.tensor([1, 2, 3, 5, 6, 7]),
        expanded_local_pos=torch.tensor([0, 1, 2] * 2, dtype=torch.int32),
        num_reqs=2,
        seq_lens_cpu_upper_bound=torch.tensor([33, 43], dtype=torch.int32),
    )
    past = torch.tensor([0, 0, 1, 0, 1, 1]).bool()
    invalid = by_grammar and torch.tensor(by_grammar).bool()
    drafter = DrafterConfig("draft_model", 2, context=CONTEXT)
    found = with_past_context(drafter, invalid, batch)
    assert torch.equal(found, past if invalid is None else past | invalid)
    for context in (None, 43):  # the longest request is within it
        drafter = DrafterConfig("draft_model", 2, context=context)
        assert with_past_context(drafter, invalid, batch) is invalid


FAR = CONTEXT + 2 * (K + 1)  # past it even if all drafts in flight are rejected


def speculator(limit: int, dp_size: int) -> Mock:
    """What `propose` reads of a speculator."""
    config = SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=MAX_MODEL_LEN),
        parallel_config=SimpleNamespace(pipeline_parallel_size=1),
    )
    made = Mock(
        spec=UnifiedSpeculator,
        target_config=config,
        vllm_config=config,
        dp_size=dp_size,
        num_speculative_steps=K,
        draft_tokens=torch.full((4, K), 7),
        tree_step=None,
        plans={0: Mock(), K: Mock()},
        drafter=Mock(rope_dims=0),
        block_tables=Mock(),
        inputs=Mock(limits=DraftLimits(0, 99, limit)),
        runner=Mock(),
    )
    made._is_past_limit = partial(UnifiedSpeculator._is_past_limit, made)
    return made


@pytest.mark.parametrize(
    "starts, context, dp_size, is_past",
    [
        ([FAR], CONTEXT, 1, True),
        ([FAR, FAR + 50], CONTEXT, 1, True),
        ([FAR - 1], CONTEXT, 1, False),
        ([FAR, 3], CONTEXT, 1, False),
        ([FAR], CONTEXT, 2, False),  # the other rank may run a pass
        ([FAR], None, 1, False),
    ],
)
@torch.inference_mode()
def test_no_pass_if_no_request_can_use_drafts(
    starts: list[int], context: int | None, dp_size: int, is_past: bool
):
    """Of requests with K + 1 tokens each, which start at these positions. Regression:
    after shorter drafts, the embedding of -1 was looked up."""
    limit = DrafterConfig("draft_model", K, context=context).limit(MAX_MODEL_LEN)
    made = speculator(limit, dp_size)
    batch = SimpleNamespace(
        num_reqs=len(starts),
        num_scheduled_tokens=np.full(len(starts), K + 1),
        seq_lens_cpu_upper_bound=torch.tensor(starts, dtype=torch.int32) + K + 1,
    )
    for num_drafts in (0, K):
        states = [Mock() for _ in range(6)]
        found = UnifiedSpeculator.propose(
            made, batch, {}, {}, Mock(), None, *states[:3], [None], *states[:2],
            num_speculative_tokens=num_drafts,
        )  # fmt: skip
        assert made.runner.run.called is not is_past
        if is_past:
            found[:, num_drafts:] = -1  # as the model runner does
    assert found.shape == (len(starts), K) and (found >= 0).all()


def test_warm_up_may_ask_for_the_nodes_of_trees_that_are_not_drafted():
    """Regression: a GPU engine that fell back to chains did not start."""
    made, states = speculator(MAX_MODEL_LEN, 1), [Mock() for _ in range(6)]
    UnifiedSpeculator.propose(
        made, Mock(num_reqs=1), {}, {}, Mock(), None, *states[:3], [None], *states[:2],
        num_speculative_tokens=31,
    )  # fmt: skip
    assert made.runner.run.call_args.args[1] is made.plans[K]


@dataclass
class Batch:
    num_reqs: int


def test_idle_rank_drafts_for_as_many_requests_as_the_ranks_agreed_on():
    """Regression: its dummy batch is padded to the target's graph, the draft step's
    sizes are not, and attention read past the end of its rows."""
    made, states = speculator(MAX_MODEL_LEN, 2), [Mock() for _ in range(6)]
    made.inputs.multimodal = None
    found = UnifiedSpeculator.propose(
        made, Batch(4), {}, {}, Mock(), None, *states[:3], [None], *states[:2],
        dp_sync_state=Mock(spec=DPSyncState, num_reqs=3), dummy_run=True,
    )  # fmt: skip
    step, *_ = made.runner.run.call_args.args
    assert step.batch.num_reqs == len(found) == 3
