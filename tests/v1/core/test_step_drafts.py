# SPDX-License-Identifier: Apache-2.0
"""Which drafts count: those that are verified, and of these what a request receives."""

from statistics import mode

import numpy as np
import pytest

from vllm.config.drafter import DrafterConfig, StepTimes
from vllm.v1.core.sched.draft_policy import DraftPolicy
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.spec_decode.step_metrics import StepDrafting

K, N, STOP = 3, 5, 7
REFUSES = {"extra_args": {"disable_spec_decode": True}}
TREE = {"draft_tree": N}


def step(
    scheduler: Scheduler,
    sampled: list[int],
    ranks=None,
    invalid: int = 0,  # scheduled drafts that were not verified
    verify_budget: int | None = None,
):
    """Outputs of a step of the only request; with trees, `ranks` are those of accepted
    nodes, and before them whether a chain was verified."""
    scheduled = scheduler.schedule()
    scheduled.num_invalid_spec_tokens = {"a": invalid}
    scheduled.verify_budget = verify_budget
    nodes = ranks and np.array([[[*range(K + 1)]], [ranks]])
    output = ModelRunnerOutput(["a"], {"a": 0}, [sampled], accepted_nodes=nodes)
    return scheduler.update_from_output(scheduled, output)[0]


def verify(scheduler: Scheduler, drafts: int, sampled: list[int], **how):
    """Outputs of a step that verifies so many drafts."""
    scheduler.update_draft_token_ids(DraftTokenIds(["a"], [[1] * drafts]))
    return step(scheduler, sampled, **how)


def counts(scheduler: Scheduler, outputs) -> list[int] | None:
    """Verified and accepted tokens of a step; those of the request are the same."""
    stats = outputs.scheduler_stats.spec_decoding_stats
    of_request = outputs.outputs[0].spec_decode_metrics
    if of_request is None:
        of_request = scheduler.requests["a"].spec_decode_metrics
    found = of_request.to_dict()
    assert found["num_spec_tokens"] == K
    if stats is None:
        assert found["num_spec_steps"] == 0
        return None
    assert stats.num_drafts == found["num_spec_steps"] == 1
    assert sum(stats.num_draft_tokens_per_pos[K:]) == 0
    assert sum(stats.num_accepted_tokens_per_pos) == stats.num_accepted_tokens
    by_step = found["per_step_drafted"], found["per_step_accepted"]
    assert by_step == ([stats.num_draft_tokens], [stats.num_accepted_tokens])
    return [stats.num_draft_tokens, stats.num_accepted_tokens]


ENDS = {
    "max_tokens": {"max_tokens": 3},
    "stop token": {"stop_token_ids": [STOP]},
    "both": {"max_tokens": 3, "stop_token_ids": [STOP]},
}


@pytest.mark.parametrize("is_tree", [False, True])
@pytest.mark.parametrize("sampling", ENDS.values(), ids=ENDS)
def test_tokens_past_the_end_of_a_request_count_as_rejected(
    make_scheduler, sampling: dict, is_tree: bool
):
    scheduler = make_scheduler(sampling=sampling, **(TREE if is_tree else {}))
    step(scheduler, [1])
    ranks = [0, 0, 1, 0] if is_tree else None
    drafts = N if is_tree else K
    outputs = verify(scheduler, drafts, [4, STOP, 5, 6], ranks=ranks)
    assert outputs.outputs[0].new_token_ids == [4, STOP]
    assert counts(scheduler, outputs) == [drafts, 1]
    if is_tree:
        trees = outputs.scheduler_stats.spec_decoding_stats.trees
        assert trees.accepted_by_rank == {0: 1}


PLACEHOLDERS = {
    "all verified": ({}, K, {}, [K, 1]),
    "turned off": (REFUSES, K, {}, None),
    "grammar": ({}, K, {"invalid": 1}, [K - 1, 1]),
    "tree": ({}, N, {"ranks": [0, 1, 0, 0]}, [N, 1]),
    "chain in a tree": ({}, N, {"ranks": [1, 0, 0, 0]}, [K, 1]),
    "grammar in a tree": ({}, N, {"ranks": [1, 0, 0, 0], "invalid": N - 2}, [2, 1]),
}


@pytest.mark.parametrize(
    "sampling, drafts, how, expected", PLACEHOLDERS.values(), ids=PLACEHOLDERS
)
def test_only_verified_drafts_count(
    make_scheduler, sampling: dict, drafts: int, how: dict, expected
):
    """Regression: requests that refuse drafts counted them in their own metrics."""
    scheduler = make_scheduler(sampling=sampling, **(TREE if drafts == N else {}))
    step(scheduler, [1])
    assert counts(scheduler, verify(scheduler, drafts, [1, 9], **how)) == expected


def test_drafts_of_a_trimmed_step_count_even_if_none_is_verified(make_scheduler):
    """So that accepted tokens + 1 are what a request receives in such a step."""
    scheduler = make_scheduler()
    step(scheduler, [1])
    outputs = verify(scheduler, K, [9], invalid=K, verify_budget=0)
    assert counts(scheduler, outputs) == [0, 0]


@pytest.mark.parametrize("room, expected", [(0, None), (2, [2, 1]), (K, [K, 1])])
@pytest.mark.parametrize("is_tree", [False, True])
def test_drafts_past_the_drafters_context_do_not_count(
    make_scheduler, monkeypatch, is_tree: bool, room: int, expected
):
    known = 4  # a prompt of three tokens, and the first of the output
    monkeypatch.setattr(DrafterConfig, "limit", lambda *_: known + room)
    scheduler = make_scheduler(**(TREE if is_tree else {}))
    step(scheduler, [1])
    ranks, drafts = ([0] * 4, N) if is_tree else (None, K)
    outputs = verify(scheduler, drafts, [1, 9] if room else [9], ranks=ranks)
    if is_tree and room == K:
        expected = [N, 1]
    assert counts(scheduler, outputs) == expected


def test_placeholders_of_requests_from_the_queue_do_not_count(make_scheduler):
    """Whose last token alone is to be computed, so that it looks like a decode."""
    scheduler = make_scheduler()
    request = scheduler.requests["a"]
    scheduled = scheduler.schedule()
    scheduled.scheduled_spec_decode_tokens["a"] = [-1] * K
    request.num_computed_tokens += K
    output = ModelRunnerOutput(["a"], {"a": 0}, [[9]])
    outputs = scheduler.update_from_output(scheduled, output)[0]
    assert request.num_computed_tokens == 3
    assert counts(scheduler, outputs) is None


@pytest.mark.parametrize("max_tokens, drafts", [(2, 0), (3, 1), (5, 3)])
def test_auto_learns_what_requests_receive(
    make_scheduler, max_tokens: int, drafts: int
):
    """Regression: with short answers long drafts seemed to pay."""
    auto = {"num_speculative_tokens_per_batch_size": "auto"}
    scheduler = make_scheduler(sampling={"max_tokens": max_tokens}, **auto)
    times = {256: {1: {0: 1.0, 1: 1.2, 2: 1.4, 3: 1.6}}}
    policy = DraftPolicy(scheduler, StepTimes(times))
    scheduler.step_drafts.policy = policy
    asked, chosen = scheduler.requests["a"].sampling_params, []
    for _ in range(60):
        step(scheduler, [1])
        chosen.append(policy.chooser.plan)
        verify(scheduler, K, [1] * (K + 1))
        scheduler.add_request(Request("a", [1, 2, 3], asked, None))
    assert mode(chosen[20:]) == drafts


@pytest.mark.parametrize(("max_tokens", "drafts"), [(1, 0), (2, K)])
def test_drafts_that_nobody_can_use_are_not_made(make_scheduler, max_tokens, drafts):
    scheduler = make_scheduler(sampling={"max_tokens": max_tokens})
    scheduled = scheduler.schedule()
    assert scheduled.skip_drafts == (not drafts)
    assert scheduled.num_spec_tokens_to_schedule == drafts
    seconds = (0.2, 0.1)
    output = ModelRunnerOutput(["a"], {"a": 0}, [[5]], step_seconds=seconds)
    stats = scheduler.update_from_output(scheduled, output)[0].scheduler_stats
    assert stats.step_drafting == StepDrafting("draft_model", "pard", drafts, seconds)
    assert stats.spec_decoding_stats is None


def test_accepted_nodes_are_those_of_the_requests_own_row(make_scheduler):
    scheduler = make_scheduler(**TREE)
    step(scheduler, [7])
    scheduler.update_draft_token_ids(DraftTokenIds(["a"], [[1, 2, 3, 4, 5]]))
    scheduled = scheduler.schedule()
    nodes = np.array([[[0, 1, 2, 3], [0, 1, 4, 0]], [[0, 0, 0, 0], [0, 0, 1, 0]]])
    output = ModelRunnerOutput(
        ["b", "a"], {"b": 0, "a": 1}, [[1], [1, 4, 9]], accepted_nodes=nodes
    )
    stats = scheduler.update_from_output(scheduled, output)[0].scheduler_stats
    trees = stats.spec_decoding_stats.trees
    assert (trees.num_nodes, trees.accepted_by_rank) == (N, {0: 1, 1: 1})


@pytest.mark.parametrize("how", [{"drafter": None}, {"log_stats": False}, {}])
def test_step_without_drafter_or_stats_or_tokens(make_scheduler, how):
    scheduler = make_scheduler(**how)
    if not how:
        empty, output = SchedulerOutput.make_empty(), ModelRunnerOutput([], {})
        outputs = scheduler.update_from_output(empty, output)[0]
    else:
        outputs = step(scheduler, [7])
    stats = outputs.scheduler_stats
    assert stats is None or stats.step_drafting is None
