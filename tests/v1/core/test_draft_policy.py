# SPDX-License-Identifier: Apache-2.0
"""The scheduler's steps draft and verify what `DraftPolicy` chooses, which learns."""

from itertools import count, groupby
from types import SimpleNamespace

import numpy as np
import pytest

from vllm import SamplingParams
from vllm.config.drafter import DrafterConfig, StepTimes
from vllm.config.drafter.length import AutoSchedule
from vllm.v1.core.sched import draft_policy
from vllm.v1.core.sched.draft_policy import HELD, OBSERVED, REPORTED_EVERY, DraftPolicy
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.spec_decode.auto.acceptance import ALL_GREEDY
from vllm.v1.spec_decode.auto.chooser import Load
from vllm.v1.spec_decode.draft_trees import AcceptedNodes

TIMES = {256: {1: {0: 1.0, 3: 1.1}, 8: {0: 1.0, 3: 9.0}}}
DRAFTERS_LIMIT = 1000
RANKS_AGREE_EVERY = 4


def make_policy(schedule="auto", times=TIMES, trimmed=None, ranks: int = 1):
    """The policy of a scheduler without requests."""
    spec = SimpleNamespace(
        num_speculative_tokens=3,
        num_speculative_tokens_per_batch_size=schedule,
        drafter=DrafterConfig("draft_model", 3, context=DRAFTERS_LIMIT),
        step_times=StepTimes(times, trimmed),
    )
    parallel = SimpleNamespace(
        data_parallel_size=ranks,
        dp_sync_interval=RANKS_AGREE_EVERY,
        pipeline_parallel_size=1,
    )
    config = SimpleNamespace(speculative_config=spec, parallel_config=parallel)
    scheduler = SimpleNamespace(vllm_config=config, max_model_len=4096, running=[])
    return DraftPolicy.of(scheduler)


def make_step(names, num_drafts: int = 0, **more) -> SchedulerOutput:
    step = SchedulerOutput.make_empty()
    step.num_scheduled_tokens = dict.fromkeys(names, num_drafts + 1)
    step.total_num_scheduled_tokens = len(step.num_scheduled_tokens) * (num_drafts + 1)
    drafts = [-1] * num_drafts
    step.scheduled_spec_decode_tokens = dict.fromkeys(names, drafts) if drafts else {}
    for name, value in more.items():
        setattr(step, name, value)
    return step


def choose(policy: DraftPolicy, num_reqs: int = 1) -> int:
    """Drafts per request of a step."""
    step = make_step(map(str, range(num_reqs)))
    policy.choose(step)
    return step.num_spec_tokens_to_schedule


def verify(policy, num_tokens: int, num_accepted: int, tree=None, **more) -> None:
    """Reports one request's draft as `StepDrafts` does."""
    request = SimpleNamespace(
        request_id="0",
        sampling_params=more.get("sampling_params"),
        is_finished=lambda: more.get("has_ended", False),
    )
    policy.observe(request, num_tokens, num_accepted, tree)


REFUSING = SamplingParams(extra_args={"disable_spec_decode": True})


@pytest.mark.parametrize(
    "useless, good",
    [
        ((3, 0), (3, 3)),
        # Regression: the chain's acceptance was guessed from the tree's, so chains
        # looked good even if only nodes outside of the chain were accepted.
        (
            (7, 2, AcceptedNodes([4, 5], [1, 0], 3)),
            (7, 2, AcceptedNodes([1, 2], [0, 0], 3)),
        ),
    ],
    ids=["chains", "trees"],
)
def test_auto_learns_from_verified_drafts(useless: tuple, good: tuple):
    policy = make_policy()
    assert (choose(policy), choose(policy, 8)) == (3, 0)
    for seen, drafts in (((0, 0), 3), (useless, 0), (good, 3)):
        for _ in range(100):
            verify(policy, *seen)
        choose(policy)
        for _ in range(HELD):
            last = choose(policy)
        assert last == drafts


ids = count(1)


def requests(*lengths: int) -> list[SimpleNamespace]:
    """New requests of these lengths, of which two tokens are placeholders."""
    return [
        SimpleNamespace(
            request_id=str(next(ids)),
            num_tokens=length - 2,
            num_output_placeholders=2,
            sampling_params=None,
            use_structured_output=False,
        )
        for length in lengths
    ]


def test_load_describes_running_requests():
    policy = make_policy()
    scheduler = policy._scheduler
    assert policy.load(3) == Load(3, 3, 0.0)  # nothing is running yet
    scheduler.running = requests(100, 200, DRAFTERS_LIMIT, 300)
    assert policy.load(4) == Load(4, 3, 400.0)
    # Fewer than all running requests are scheduled in the step.
    assert policy.load(2) == Load(2, 1, 400.0)
    assert policy.load(1) == Load(1, 1, 400.0)
    first, second, *_ = scheduler.running
    first.sampling_params = REFUSING
    assert policy.load(4) == Load(4, 2, 400.0)
    second.use_structured_output = True
    assert policy.load(4) == Load(4, 2, 400.0, has_grammar=True)
    second.sampling_params = SamplingParams(temperature=0.5)
    assert policy.load(4).shares == (0.5, 0.5, 0.0)
    second.sampling_params = REFUSING
    assert policy.load(4).shares == ALL_GREEDY


def test_choice_holds_until_batch_changes(monkeypatch):
    """Choosing in every step takes host time, for which short steps have to wait."""
    policy, elapsed_of = make_policy(), []
    chosen = policy.chooser.choose

    def counted(load, elapsed):
        elapsed_of.append(elapsed)
        return chosen(load, elapsed)

    monkeypatch.setattr(policy.chooser, "choose", counted)
    policy._scheduler.running = requests(100)
    for _ in range(2 * HELD + 1):
        assert choose(policy) == 3
    assert elapsed_of == [1, HELD, HELD]
    policy._scheduler.running = requests(100)  # another one in its place
    choose(policy), choose(policy, 2)
    assert elapsed_of[3:] == [1, 1]


def test_trials_are_chosen_step_by_step():
    """One begins with one step with drafts, and goes on only if they are accepted."""
    policy, drafted = make_policy(), []
    policy._scheduler.running = requests(100)
    for _ in range(300):
        drafted.append(choose(policy))
        if drafted[-1]:
            verify(policy, 3, 0)
    before, *trials = (len([*same]) for n, same in groupby(drafted) if n)
    assert before > HELD and trials and set(trials) == {1}


def test_acceptance_of_large_batch_is_learned_from_part_of_it(monkeypatch):
    policy, seen = make_policy(), []
    monkeypatch.setattr(policy.chooser, "observe", lambda *one: seen.append(one))
    for size, expected in ((4 * OBSERVED, OBSERVED), (OBSERVED, OBSERVED)):
        policy._scheduler.running = requests(*[100] * size)
        for _ in range(size):
            verify(policy, 3, 3)
        assert len(seen) == expected
        seen.clear()


def test_served_steps_are_timed(monkeypatch):
    """Between outputs of equal steps, that draft as many as they verify."""
    policy, seen, now = make_policy(), [], iter(range(5, 100))
    monkeypatch.setattr(draft_policy.time, "perf_counter", lambda: next(now))
    monkeypatch.setattr(policy.chooser, "observe_seconds", lambda *of: seen.append(of))
    choose(policy)
    same = make_step("ab", 3, num_spec_tokens_to_schedule=3)
    longer = make_step("ab", 3, num_spec_tokens_to_schedule=5)
    prompt = make_step("ab", 3, num_spec_tokens_to_schedule=3)
    prompt.total_num_scheduled_tokens += 20
    for step in (same, same, longer, longer, same, prompt, prompt, make_step("")):
        policy.end_step(step, output())
    assert seen == [(2, 0.0, 3, 1, None)]


# Steps that verify only part of their drafts.

N = 8
NAMES = [str(i) for i in range(N)]


def output(probs: float | None = None, verified: int = 3, sampled: int = 1):
    return SimpleNamespace(
        req_ids=NAMES,
        acceptance_probs=None if probs is None else np.full((N, 3), probs),
        num_rejected=np.full(N, verified + 1 - sampled),
        sampled_token_ids=[[0] * sampled for _ in NAMES],
    )


@pytest.fixture
def partial() -> DraftPolicy:
    """Rows are so expensive that only very likely drafts pay for one; the step before
    drafted chains."""
    rows = {k: 0.01 + 0.01 * N * (k + 1) for k in (0.5, 1, 2, 3)}
    times = {256: {n: {3: n * rows[3]} for n in (1, N)}}
    policy = make_policy(AutoSchedule([3]), times, {N: rows})
    step(policy)
    return policy


def step(policy: DraftPolicy, names=NAMES, num_drafts: int = 3, **more):
    made = make_step(names, num_drafts, **more)
    policy.choose(made)
    return made


def test_drafts_without_probabilities_are_verified(partial):
    """Otherwise they would be ranked by the probabilities of earlier drafts."""
    assert 0 < step(partial).verify_budget < 3 * N
    assert step(partial, NAMES[:-1]).verify_budget is None
    assert step(partial).verify_budget is None
    assert step(partial).verify_budget is not None
    assert step(partial, [*NAMES, "new"]).verify_budget is None


def test_trees_are_verified_whole_and_chains_left_of_them_too(partial):
    """A chain that is left of a tree has no probabilities, whatever its length."""
    partial.chooser.fixed = 6
    assert step(partial).verify_budget is not None
    partial.chooser.fixed = 3
    assert step(partial, num_drafts=6).verify_budget is None
    partial.chooser.fixed = 6
    step(partial)
    assert step(partial).verify_budget is None  # all near the end of their context


PROMPT = {**dict.fromkeys(NAMES, 4), "0": 20}
FEWER = {**dict.fromkeys(NAMES, [-1] * 3), "0": [-1]}
OTHERS = {
    "a prompt among them": {"num_scheduled_tokens": PROMPT},
    "one with fewer drafts": {"scheduled_spec_decode_tokens": FEWER},
    "no drafts": {"num_drafts": 0},
    "a length that was not timed": {"num_drafts": 2},
}


@pytest.mark.parametrize("more", OTHERS.values(), ids=OTHERS)
def test_other_steps_are_not_trimmed(partial, more):
    assert step(partial, **more).verify_budget is None


def test_steps_with_a_grammar_are_not_trimmed(partial):
    running = partial._scheduler.running = requests(*[100] * N)
    assert step(partial).verify_budget is not None
    running[0].use_structured_output = True
    assert step(partial).verify_budget is None


def test_reports_are_asked_for_periodically(partial):
    asked = [step(partial).report_acceptance_probs for _ in range(3 * REPORTED_EVERY)]
    assert sum(asked) == 3


def test_unverified_drafts_count_as_invalid_spec_tokens(partial):
    trimmed, whole = make_step(NAMES, 3, verify_budget=N), make_step(NAMES, 3)
    partial.end_step(trimmed, output(0.5, 1, 1))
    assert trimmed.num_invalid_spec_tokens == dict.fromkeys(NAMES, 2)
    partial.end_step(whole, output(0.5, 3, 1))
    assert whole.num_invalid_spec_tokens is None


@pytest.mark.parametrize(
    "verified, sampled, drafts",
    [(0, 1, [0, 1]), (1, 2, [1, 2]), (1, 1, []), (3, 4, [])],
)
@pytest.mark.parametrize("has_ended", [False, True])
def test_unverified_drafts_after_accepted_ones_count_with_their_probabilities(
    partial, monkeypatch, verified: int, sampled: int, drafts: list[int], has_ended
):
    """Unless they are past the end of the request."""
    found, seen = output(0.5, verified, sampled), []
    found.acceptance_probs[:] = range(3)
    partial.end_step(make_step(NAMES, 3, verify_budget=N), found)
    monkeypatch.setattr(partial.chooser, "observe", lambda one, *_: seen.append(one))
    verify(partial, verified, sampled - 1, has_ended=has_ended)
    if drafts and has_ended and not verified:
        assert not seen
    else:
        assert [*seen[0].unverified] == ([] if has_ended else drafts)


def test_nothing_is_learned_of_trimmed_steps_without_a_report(partial, monkeypatch):
    seen = []
    monkeypatch.setattr(partial.chooser, "observe", lambda *one: seen.append(one))
    for probs in (None, 0.5):
        partial.end_step(make_step(NAMES, 3, verify_budget=N), output(probs, 1, 2))
        verify(partial, 1, 1)
        assert len(seen) == (probs is not None)
