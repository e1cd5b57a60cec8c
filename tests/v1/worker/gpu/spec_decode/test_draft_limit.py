# SPDX-License-Identifier: Apache-2.0
"""Past the drafter's context: what is not accepted, and when nothing is drafted."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from vllm.config.drafter import DrafterConfig
from vllm.platforms import current_platform

if current_platform.is_cpu():
    import vllm.v1.worker.cpu.shm  # noqa: F401  (what Runner V2 needs on a CPU)

from vllm.v1.worker.gpu.spec_decode.draft_limit import without_drafts_past_limit
from vllm.v1.worker.gpu.spec_decode.unified.speculator import UnifiedSpeculator

CONTEXT, MAX_MODEL_LEN, K = 32, 200, 3


@pytest.mark.parametrize("by_grammar", [None, [0, 1, 0, 0, 0, 0]])
def test_drafts_past_the_context_are_not_verified(by_grammar: list[int] | None):
    """Of two requests with two drafts each, whose first rows hold no draft."""
    batch = SimpleNamespace(
        positions=torch.tensor([0, 30, 31, 32, 0, 40, 41, 42]),
        logits_indices=torch.tensor([1, 2, 3, 5, 6, 7]),
        expanded_local_pos=torch.tensor([0, 1, 2] * 2, dtype=torch.int32),
    )
    past = torch.tensor([0, 0, 1, 0, 1, 1]).bool()
    invalid = by_grammar and torch.tensor(by_grammar).bool()
    drafter = DrafterConfig("draft_model", 2, context=CONTEXT)
    found = without_drafts_past_limit(drafter, invalid, batch)
    assert torch.equal(found, past if invalid is None else past | invalid)
    drafter = DrafterConfig("draft_model", 2)
    assert without_drafts_past_limit(drafter, invalid, batch) is invalid


class LaidOut(Exception):
    """A step went on to lay a draft batch out."""


def speculator(context: int | None = CONTEXT, dp_size: int = 1) -> UnifiedSpeculator:
    """As far as a step that drafts for nobody needs one."""
    made = UnifiedSpeculator.__new__(UnifiedSpeculator)
    drafter = DrafterConfig("draft_model", K, context=context)
    made.speculative_config = SimpleNamespace(drafter=drafter)
    made.vllm_config = made.target_config = SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=MAX_MODEL_LEN),
        parallel_config=SimpleNamespace(pipeline_parallel_size=1),
    )
    made.dp_size, made.num_speculative_steps = dp_size, K
    made.tree_step = None
    made.block_tables = SimpleNamespace(target=SimpleNamespace(slot_mappings=None))
    made.draft_tokens = torch.zeros(8, K, dtype=torch.int64)
    return made


def propose(made: UnifiedSpeculator, starts: list[int], **given) -> torch.Tensor:
    """A step of requests with K + 1 tokens each, from these positions on.

    Raises:
        LaidOut: it does not end before it asks for its plan.
    """

    class Plans(dict):
        def __missing__(self, _):
            raise LaidOut

    made.plans = Plans()
    queries = np.full(len(starts), K + 1)
    batch = SimpleNamespace(
        num_reqs=len(starts),
        num_scheduled_tokens=queries,
        seq_lens_cpu_upper_bound=torch.tensor(starts, dtype=torch.int32) + K + 1,
    )
    return made.propose(batch, {}, {}, *[None] * 8, **given)


FAR = CONTEXT + 2 * (K + 1)  # in spite of drafts that may yet be rejected


@pytest.mark.parametrize("starts", [[FAR], [FAR, FAR + 50]])
def test_no_pass_where_no_request_can_use_its_drafts(starts: list[int]):
    assert propose(speculator(), starts).shape == (len(starts), K)


@pytest.mark.parametrize(
    "case",
    [
        {"starts": [FAR - 1]},
        {"starts": [FAR, 3]},
        {"starts": [FAR], "dummy_run": True},  # to warm up
        {"starts": [FAR], "dp_size": 2},  # the other rank may run a pass
        {"starts": [FAR], "context": None},
    ],
)
def test_any_other_step_runs_its_passes(case: dict):
    case = dict(case)
    starts, dummy = case.pop("starts"), case.pop("dummy_run", False)
    with pytest.raises(LaidOut):
        propose(speculator(**case), starts, dummy_run=dummy)
