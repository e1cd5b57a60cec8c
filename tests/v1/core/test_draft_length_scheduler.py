# SPDX-License-Identifier: Apache-2.0
"""The scheduler gets the draft length from `ChosenLengths` and reports acceptance."""

from itertools import count, groupby
from types import SimpleNamespace

import pytest

from vllm import SamplingParams
from vllm.config.drafter import DrafterConfig
from vllm.config.drafter.drafter import StepTimes
from vllm.v1.core.sched.draft_load import HELD, OBSERVED, ChosenLengths
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.sched.step_drafts import VerifiedDraft
from vllm.v1.spec_decode.accepted_nodes import AcceptedNodes
from vllm.v1.spec_decode.dynamic.acceptance_by_kind import ALL_GREEDY, FIRST_TOKENS
from vllm.v1.spec_decode.dynamic.draft_length import Load
from vllm.v1.spec_decode.step_metrics import StepDrafting

TIMES = {256: {1: {0: 1.0, 3: 1.1}, 8: {0: 1.0, 3: 9.0}}}
DRAFTERS_LIMIT = 1000


def make_scheduler(schedule, times=None, ranks: int = 1) -> Scheduler:
    """A scheduler with only the attributes that these tests need."""
    scheduler = Scheduler.__new__(Scheduler)
    scheduler.num_spec_tokens, scheduler.log_stats = 3, True
    scheduler.max_model_len, scheduler.running = 4096, []
    spec = SimpleNamespace(
        num_speculative_tokens=scheduler.num_spec_tokens,
        num_speculative_tokens_per_batch_size=schedule,
        drafter=DrafterConfig("draft_model", 3, context=DRAFTERS_LIMIT),
        step_times=StepTimes(times or {}),
    )
    parallel = SimpleNamespace(
        data_parallel_size=ranks, dp_sync_interval=16, pipeline_parallel_size=1
    )
    scheduler.vllm_config = SimpleNamespace(
        speculative_config=spec,
        parallel_config=parallel,
        cache_config=SimpleNamespace(enable_prefix_caching=False),
    )
    scheduler.draft_lengths = ChosenLengths.of(scheduler)
    request = SimpleNamespace(
        request_id="0",
        sampling_params=None,
        num_tokens=100,
        num_output_tokens=50,
        is_finished=lambda: False,
    )
    scheduler.requests = {"0": request}
    return scheduler


def verify(scheduler, num_tokens: int, num_accepted: int, tree=None) -> None:
    """Reports one request's draft as `StepDrafts` does."""
    counts = num_accepted + 1, num_tokens, num_accepted
    draft = VerifiedDraft(scheduler.requests["0"], *counts, tree)
    scheduler.draft_lengths.observe(draft)


REFUSING = SamplingParams(extra_args={"disable_spec_decode": True})


def test_auto_learns_only_from_verified_drafts():
    scheduler = make_scheduler("auto", TIMES)
    lookup = scheduler.draft_lengths
    assert (lookup[1], lookup[8]) == (3, 0)
    for num_tokens, drafts in ((0, 3), (3, 0)):
        for _ in range(50):
            verify(scheduler, num_tokens, 0)
        assert lookup[1] == drafts


def test_tree_observes_acceptance_of_its_chain():
    """Regression: the chain's acceptance was guessed from the tree's, so chains looked
    good even if only nodes outside of the chain were accepted."""
    scheduler = make_scheduler("auto", TIMES)
    scheduler.num_spec_tokens = 7
    for nodes, ranks, drafts in (([4, 5], [1, 0], 0), ([1, 2], [0, 0], 3)):
        for _ in range(50):
            verify(scheduler, 7, 2, AcceptedNodes(nodes, ranks, 3))
        assert scheduler.draft_lengths[1] == drafts


def test_auto_without_times_uses_maximum_length():
    assert make_scheduler("auto").draft_lengths[1] == 3


def test_explicit_schedule_is_kept():
    scheduler = make_scheduler([(1, 1, 1), (2, 2, 2)])
    assert scheduler.draft_lengths is None


ids = count(1)


def requests(*lengths: int) -> list[SimpleNamespace]:
    """New requests of these lengths; half is output, two are placeholders."""
    return [
        SimpleNamespace(
            request_id=str(next(ids)),
            num_tokens=length - 2,
            num_output_tokens=length // 2,
            num_output_placeholders=2,
            sampling_params=None,
            use_structured_output=False,
        )
        for length in lengths
    ]


def test_load_describes_running_requests():
    scheduler = make_scheduler("auto", TIMES)
    lookup = scheduler.draft_lengths
    assert lookup.load(3) == Load(3, 3, 0.0, age=0.0)  # nothing is running yet
    scheduler.running = requests(100, 200, DRAFTERS_LIMIT, 300)
    assert lookup.load(4) == Load(4, 3, 400.0, age=200.0)
    # Fewer than all running requests are scheduled in the step.
    assert lookup.load(2) == Load(2, 1, 400.0, age=200.0)
    assert lookup.load(1) == Load(1, 1, 400.0, age=200.0)
    scheduler.running[0].sampling_params = REFUSING
    assert lookup.load(4) == Load(4, 2, 400.0, age=200.0)
    scheduler.running[1].use_structured_output = True
    assert lookup.load(4) == Load(4, 2, 400.0, has_grammar=True, age=200.0)
    scheduler.running[1].sampling_params = SamplingParams(temperature=0.5)
    assert lookup.load(4).shares == (0.5, 0.5, *[0.0] * 4)
    scheduler.running[1].num_output_tokens = FIRST_TOKENS - 1
    assert lookup.load(4).shares == (0.5, 0.0, 0.0, 0.0, 0.5, 0.0)
    scheduler.running[1].sampling_params = REFUSING
    assert lookup.load(4).shares == ALL_GREEDY


def test_acceptance_of_sampled_text_does_not_affect_greedy_text():
    scheduler = make_scheduler("auto", TIMES)
    lookup, request = scheduler.draft_lengths, scheduler.requests["0"]
    request.sampling_params = SamplingParams(temperature=1.0)
    scheduler.running = requests(100)
    scheduler.running[0].sampling_params = request.sampling_params
    assert lookup[1] == 3
    for _ in range(50):
        verify(scheduler, 3, 0)
        drafts = lookup[1]
    assert drafts == 0
    scheduler.running = requests(100)
    assert lookup[1] == 3


def know(scheduler) -> None:
    """Has so many drafts verified that choices hold."""
    for _ in range(50):
        verify(scheduler, 3, 3)
    scheduler.draft_lengths.lengths.end_steps()


def test_choice_holds_until_batch_changes(monkeypatch):
    """Choosing in every step takes host time, for which short steps have to wait."""
    scheduler = make_scheduler("auto", TIMES)
    lookup, chosen = scheduler.draft_lengths, []
    choose = lookup.lengths.choose

    def counted(load, gains, elapsed):
        chosen.append(elapsed)
        return choose(load, gains, elapsed)

    monkeypatch.setattr(lookup.lengths, "choose", counted)
    scheduler.running = requests(100)
    for _ in range(2 * HELD):
        assert lookup[1] == 3
    assert chosen == [1] * 2 * HELD  # nothing is known yet
    know(scheduler)
    chosen.clear()
    for _ in range(2 * HELD):
        assert lookup[1] == 3
    assert chosen == [1, HELD]
    scheduler.running = requests(100)  # another one in its place
    lookup[1]
    lookup[2]
    assert chosen == [1, HELD, HELD, 1]


def test_tries_are_chosen_step_by_step():
    """A try begins with one step with drafts, and goes on only if they are accepted."""
    scheduler = make_scheduler("auto", TIMES)
    scheduler.running = requests(100)
    drafted = []
    for _ in range(200):
        drafted.append(scheduler.draft_lengths[1])
        if drafted[-1]:
            verify(scheduler, 3, 0)
    before, *tries = (len([*same]) for n, same in groupby(drafted) if n)
    assert before > HELD and tries and set(tries) == {1}


def test_acceptance_of_large_batch_is_learned_from_part_of_it():
    scheduler = make_scheduler("auto", TIMES)
    lookup = scheduler.draft_lengths
    scheduler.running = requests(*[100] * 4 * OBSERVED)
    observed = [lookup._is_observed(each.request_id) for each in scheduler.running]
    assert OBSERVED // 2 < sum(observed) < 2 * OBSERVED
    del scheduler.running[OBSERVED:]
    assert all(lookup._is_observed(each.request_id) for each in scheduler.running)


@pytest.mark.parametrize("has_ended", [False, True])
def test_unverified_drafts_past_the_end_of_a_request_are_not_learned(
    monkeypatch, has_ended: bool
):
    scheduler, seen = make_scheduler("auto", TIMES), []
    lookup, request = scheduler.draft_lengths, scheduler.requests["0"]
    request.is_finished = lambda: has_ended
    chances = {"is_told": True, "unverified": {"0": [0.9]}}
    lookup.trimming = SimpleNamespace(is_trimmed=True, **chances)
    monkeypatch.setattr(lookup.lengths, "observe", lambda one, **_: seen.append(one))
    verify(scheduler, 2, 2)
    assert [list(one.unverified) for one in seen] == [[] if has_ended else [0.9]]


@pytest.mark.parametrize(
    "is_observed, is_told", [(True, True), (True, False), (False, True)]
)
def test_runs_end_where_steps_are_not_observed(monkeypatch, is_observed, is_told):
    scheduler = make_scheduler("auto", TIMES)
    lookup = scheduler.draft_lengths
    lookup.trimming = SimpleNamespace(is_trimmed=not is_told, is_told=is_told)
    monkeypatch.setattr(lookup, "_is_observed", lambda name: is_observed)
    runs, seen = lookup.lengths.acceptance._runs, lookup.lengths._first
    runs["0"], seen.seen = 7, 0
    verify(scheduler, 3, 1)
    assert runs == {} and seen.seen == (is_observed and is_told)


def test_gain_counts_every_step_of_a_choice(monkeypatch):
    """Regression: a choice that held counted like a single step, as tries do."""
    scheduler = make_scheduler("auto", TIMES)
    lookup, added = scheduler.draft_lengths, []
    monkeypatch.setattr(lookup.lengths.gain, "add", lambda *args: added.append(args))
    scheduler.running = requests(100)
    know(scheduler)
    lookup[1]
    added.clear()
    for _ in range(HELD - 1):
        lookup[1]
    assert len(added) == HELD - 1 and len(set(added)) == 1


@pytest.mark.parametrize("past, drafts", [(0, 3), (1, 0)])
def test_nothing_is_drafted_past_drafter_context(past, drafts):
    """Regression: every step drafted the maximum length, and no draft was offered."""
    scheduler = make_scheduler("auto", TIMES)
    scheduler.running = requests(DRAFTERS_LIMIT - 1 + past)
    assert [scheduler.draft_lengths[1] for _ in range(20)] == [drafts] * 20


def test_stats_have_expected_tokens_and_seconds():
    lookup = make_scheduler("auto", TIMES).draft_lengths
    step = StepDrafting("eagle3", "eagle3", 3)
    lookup.tell(step)
    assert step.expected is None  # nothing is chosen yet
    lookup[1]
    lookup.tell(step)
    tokens = lookup.lengths.acceptance.expected_tokens()[3]
    assert step.expected == (pytest.approx(tokens), 1.1)
    lookup.tell(None)
