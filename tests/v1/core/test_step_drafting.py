# SPDX-License-Identifier: Apache-2.0
"""A step's stats contain its draft length, whether or not drafts were verified."""

import numpy as np
import pytest

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.spec_decode.step_metrics import StepDrafting

SECONDS = (0.2, 0.1)


def step(scheduler, tokens: list[int], seconds=None):
    """Stats of a step in which the only request samples `tokens`."""
    scheduled = scheduler.schedule()
    output = ModelRunnerOutput(["a"], {"a": 0}, [tokens], step_seconds=seconds)
    outputs = scheduler.update_from_output(scheduled, output)
    return outputs[0].scheduler_stats


def test_step_without_verified_drafts(make_scheduler):
    """`spec_decoding_stats` stays None if no drafts were verified."""
    stats = step(make_scheduler(), [7], SECONDS)
    assert stats.step_drafting == StepDrafting("draft_model", "pard", 3, SECONDS)
    assert stats.spec_decoding_stats is None


def test_step_with_verified_drafts(make_scheduler):
    scheduler = make_scheduler()
    step(scheduler, [7])
    scheduler.update_draft_token_ids(DraftTokenIds(["a"], [[1, 2, 3]]))
    stats = step(scheduler, [1, 2, 9])
    assert stats.step_drafting == StepDrafting("draft_model", "pard", 3, None)
    assert stats.spec_decoding_stats.num_accepted_tokens == 2


def test_step_with_a_verified_tree(make_scheduler):
    """Stats count accepted nodes from the request's own row of `accepted_nodes`."""
    scheduler = make_scheduler(draft_tree=5)
    step(scheduler, [7])
    scheduler.update_draft_token_ids(DraftTokenIds(["a"], [[1, 2, 3, 4, 5]]))
    scheduled = scheduler.schedule()
    nodes = np.array([[[0, 1, 2, 3], [0, 1, 4, 0]], [[0, 0, 0, 0], [0, 0, 1, 0]]])
    output = ModelRunnerOutput(
        ["b", "a"], {"b": 0, "a": 1}, [[1], [1, 4, 9]], accepted_nodes=nodes
    )
    stats = scheduler.update_from_output(scheduled, output)[0].scheduler_stats
    trees = stats.spec_decoding_stats.trees
    assert (trees.num_nodes, trees.accepted_by_rank) == (5, {0: 1, 1: 1})


@pytest.mark.parametrize("how", [{"drafter": None}, {"log_stats": False}])
def test_step_without_drafter_or_stats(make_scheduler, how):
    stats = step(make_scheduler(**how), [7])
    assert stats is None or stats.step_drafting is None


def test_step_without_scheduled_tokens(make_scheduler):
    scheduler = make_scheduler()
    output = ModelRunnerOutput([], {})
    outputs = scheduler.update_from_output(SchedulerOutput.make_empty(), output)
    assert outputs[0].scheduler_stats.step_drafting is None
