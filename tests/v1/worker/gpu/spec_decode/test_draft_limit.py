# SPDX-License-Identifier: Apache-2.0
"""Past the drafter's context drafts are not accepted, and passes are skipped."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from vllm.config.drafter import DrafterConfig
from vllm.v1.worker.gpu.spec_decode.excluded_drafts import with_past_context
from vllm.v1.worker.gpu.spec_decode.unified.speculator import UnifiedSpeculator

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


def is_past_limit(
    starts: list[int], context: int | None = CONTEXT, dp_size: int = 1
) -> bool:
    """`_is_past_limit` of a step of requests with K + 1 tokens each.

    Args:
        starts: the position of each one's first token.
    """
    limit = DrafterConfig("draft_model", K, context=context).limit(MAX_MODEL_LEN)
    config = SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=MAX_MODEL_LEN),
        parallel_config=SimpleNamespace(pipeline_parallel_size=1),
    )
    speculator = SimpleNamespace(
        target_config=config,
        vllm_config=config,
        limit=limit,
        dp_size=dp_size,
        num_speculative_steps=K,
    )
    batch = SimpleNamespace(
        num_reqs=len(starts),
        num_scheduled_tokens=np.full(len(starts), K + 1),
        seq_lens_cpu_upper_bound=torch.tensor(starts, dtype=torch.int32) + K + 1,
    )
    return UnifiedSpeculator._is_past_limit(speculator, batch)


FAR = CONTEXT + 2 * (K + 1)  # past it even if all drafts in flight are rejected


@pytest.mark.parametrize("starts", [[FAR], [FAR, FAR + 50]])
def test_no_pass_if_no_request_can_use_drafts(starts: list[int]):
    assert is_past_limit(starts)


@pytest.mark.parametrize(
    "case",
    [
        {"starts": [FAR - 1]},
        {"starts": [FAR, 3]},
        {"starts": [FAR], "dp_size": 2},  # the other rank may run a pass
        {"starts": [FAR], "context": None},
    ],
)
def test_other_steps_run_passes(case: dict):
    assert not is_past_limit(**case)


@torch.inference_mode()
def test_placeholder_drafts_are_valid_tokens():
    """Regression: if shorter drafts had been timed before, the embedding of -1 was
    looked up."""
    speculator = SimpleNamespace(
        block_tables=SimpleNamespace(target=SimpleNamespace(slot_mappings=None)),
        tree_step=None,
        plans={0: None, K: None},
        _request_states=lambda *_: None,
        _rope_positions=lambda: None,
        _is_past_limit=lambda batch: True,
        draft_tokens=torch.full((4, K), 7),
    )
    batch, others = SimpleNamespace(num_reqs=2), [None] * 10
    for num_drafts in (0, K):
        found = UnifiedSpeculator.propose(speculator, batch, *others)
        found[:, num_drafts:] = -1  # as the model runner does
    assert found.shape == (2, K) and (found >= 0).all()
