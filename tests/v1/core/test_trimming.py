# SPDX-License-Identifier: Apache-2.0
"""Which steps are trimmed, by which acceptance probabilities, and what is reported."""

from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from vllm.config.drafter import DrafterConfig
from vllm.config.drafter.length import trims
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.trimming import (
    GAINS_HELD,
    REMEMBERED,
    REPORTED_EVERY,
    Trimming,
)
from vllm.v1.spec_decode.dynamic.acceptance import Verified
from vllm.v1.spec_decode.dynamic.acceptance_by_kind import ALL_GREEDY
from vllm.v1.spec_decode.dynamic.draft_length import DraftLengths, Load
from vllm.v1.spec_decode.dynamic.pass_times import leave_no_trace
from vllm.v1.spec_decode.dynamic.served_times import HALF_LIFE, TRIMMED
from vllm.v1.spec_decode.dynamic.step_times import StepTimes
from vllm.v1.spec_decode.dynamic.tries import TIMED_STEPS
from vllm.v1.worker.gpu.spec_decode import trimming as workers_trimming
from vllm.v1.worker.gpu.spec_decode.trimming import Trimming as WorkersTrimming
from vllm.v1.worker.gpu.spec_decode.trimming import make_trimming

K, N = 3, 8
NAMES = [str(i) for i in range(N)]


def seconds(rows: float) -> float:
    return 0.01 + 0.01 * rows


@pytest.fixture
def lengths() -> DraftLengths:
    """Rows are so expensive that only very likely drafts pay for one."""
    sizes = (1, N, 2 * N)
    return DraftLengths(K, {256: {n: {K: seconds(n * (K + 1))} for n in sizes}})


@pytest.fixture
def untimed(lengths) -> Trimming:
    """No step has been served."""
    parts = {k: seconds(N * (k + 1)) for k in (1, 2, 3)}
    found = Trimming(lengths, {K: {N: parts}}, least=N)
    found.gains(Load(N, N, 100.0))
    assert found.budget(make_step(num_drafts=0)) is None  # nothing drafted before
    return found


@pytest.fixture
def trimming(untimed, lengths) -> Trimming:
    """Steps that verify all have been served, and timed."""
    for _ in range(TIMED_STEPS):
        assert untimed.budget(make_step()) is None
        lengths.served.observe(N, K, 1.0)
    return untimed


def make_step(names=NAMES, num_drafts: int = K, **more) -> SchedulerOutput:
    step = SchedulerOutput.make_empty()
    step.num_scheduled_tokens = dict.fromkeys(names, num_drafts + 1)
    drafts = [-1] * num_drafts
    step.scheduled_spec_decode_tokens = dict.fromkeys(names, drafts) if drafts else {}
    step.num_spec_tokens_to_schedule = num_drafts
    for name, value in more.items():
        setattr(step, name, value)
    return step


def latest_gains(trimming, load: Load) -> dict[int, float]:
    """Gains by what is known now, instead of those held for `GAINS_HELD` choices."""
    return [trimming.gains(load) for _ in range(GAINS_HELD)][-1]


def make_output(chances: float, verified: int, sampled: int) -> SimpleNamespace:
    return SimpleNamespace(
        req_ids=NAMES,
        chances=np.full((N, K), chances, dtype=np.float32),
        num_rejected=np.full(N, verified + 1 - sampled),
        sampled_token_ids=[[0] * sampled for _ in NAMES],
    )


def test_uniform_decode_step_is_trimmed(trimming):
    budget = trimming.budget(make_step())
    assert 0 < budget < N * K
    # With more likely drafts, which are accepted, more rows pay.
    trimming.take(make_step(), make_output(0.99, K, K + 1))
    for _ in range(100):
        trimming._acceptance.observe(Verified(K, (1, 2, 3), num_best=K))
    trimming._acceptance.end_steps(ALL_GREEDY)
    trimming.gains(Load(N, N, 100.0))
    assert (trimming.budget(make_step()) or N * K) > budget


def run_steps(
    trimming: Trimming, lengths: DraftLengths, count: int, ratio: float
) -> list[bool]:
    """Whether each step is trimmed; one that is not takes `ratio` times as long as was
    measured at start, and a trimmed one as long as measured."""
    found, served, last = [], lengths.served, None
    for _ in range(count):
        found.append(trimming.budget(make_step()) is not None)
        if found[-1] == last:  # only steps after equal ones can be timed
            served.observe(N, *((TRIMMED, 1.0) if last else (K, ratio)))
        trimming.take(make_step(), make_output(0.5, K, 1))
        last = found[-1]
    return found


def test_untrimmed_steps_that_seemed_too_long_are_corrected(untimed, lengths):
    """Regression: where steps were timed at start while another engine started, all
    were trimmed from then on, and 14 % of throughput was lost."""
    found = run_steps(untimed, lengths, 200, ratio=0.5)
    assert not any(found[:TIMED_STEPS])
    assert not any(found[-100:])


def test_untrimmed_steps_are_timed_again_when_times_are_old(trimming, lengths):
    found = run_steps(trimming, lengths, 6 * HALF_LIFE, ratio=1.0)
    begins = [i + 1 for i, pair in enumerate(pairwise(found)) if pair == (True, False)]
    assert found[0] and begins
    apart = [after - before for before, after in pairwise([0, *begins])]
    assert min(apart) >= HALF_LIFE and max(apart) < 1.5 * HALF_LIFE
    # In one piece: a single step could not be timed.
    assert len(found) - sum(found) == TIMED_STEPS * len(begins)


def test_untrimmed_steps_are_timed_at_each_batch_size(trimming):
    names = [str(i) for i in range(2 * N)]
    trimming.gains(Load(2 * N, 2 * N, 100.0))
    trimming.budget(make_step(names))  # of these no chances are known yet
    found = [trimming.budget(make_step(names)) is None for _ in range(3 * TIMED_STEPS)]
    assert sum(found) == sum(found[:TIMED_STEPS]) == TIMED_STEPS


def test_untrimmed_steps_that_could_not_be_timed_are_tried_again(untimed):
    """As where requests come and go: no two steps are equal."""
    found = [untimed.budget(make_step()) is None for _ in range(1000)]
    assert sum(found) >= 2 * TIMED_STEPS


def test_budget_holds_until_probabilities_are_reported(trimming, monkeypatch):
    """Computing it takes host time, for which a trimmed step would wait."""
    asked, best = [], trimming.budgets.best
    monkeypatch.setattr(
        trimming.budgets, "best", lambda *args: asked.append(args) or best(*args)
    )
    reports = []
    for _ in range(2 * REPORTED_EVERY):
        step = make_step()
        step.verify_budget = trimming.budget(step)
        reports.append(step.reports_chances)
        output = make_output(0.5, 1, 1)
        if not step.reports_chances:
            output.chances = None
        trimming.take(step, output)
        assert trimming.is_told == step.reports_chances
        assert step.num_invalid_spec_tokens["0"] == K - 1
    assert sum(reports) == len(asked) == 2


def test_drafts_without_probabilities_are_verified(trimming):
    """Otherwise they would be ranked by the probabilities of earlier drafts."""
    assert trimming.budget(make_step(NAMES[:-1])) is None
    assert trimming.budget(make_step()) is None
    assert trimming.budget(make_step()) is not None
    assert trimming.budget(make_step([*NAMES, "new"])) is None


def test_trees_are_not_trimmed_and_chains_use_their_own_probabilities(trimming):
    """A chain that is left of a tree has no probabilities, whatever its length."""
    nodes = 2 * K
    assert trimming.budget(make_step(num_spec_tokens_to_schedule=nodes)) is not None
    to_chains = make_step(num_drafts=nodes, num_spec_tokens_to_schedule=K)
    assert trimming.budget(to_chains) is None
    assert trimming.budget(make_step(num_spec_tokens_to_schedule=nodes)) is not None
    assert trimming.budget(make_step()) is None  # all near the end of their context
    assert trimming.budget(make_step()) is not None


def add_trees(trimming: Trimming) -> None:
    """Adds a tree length to the plans whose step times are known."""
    row = {k: seconds(N * (k + 1)) for k in (K, 2 * K)}
    trimming.budgets.times = StepTimes({256: {N: row}})


def test_trees_gain_nothing_by_trimming(trimming):
    add_trees(trimming)
    assert set(latest_gains(trimming, Load(N, N, 100.0))) == {K}


def test_gains_are_recomputed_periodically(trimming, monkeypatch):
    """Regression: computing them in every step took host time, which a step of few
    requests has to wait for."""
    add_trees(trimming)
    asked, best = [], trimming.budgets.best
    monkeypatch.setattr(
        trimming.budgets, "best", lambda *args: asked.append(args) or best(*args)
    )
    load = Load(N, N, 100.0)
    latest_gains(trimming, load)
    asked.clear()
    for step in map(float, range(GAINS_HELD)):  # context and age grow each step
        assert set(trimming.gains(load._replace(context=step, age=step))) == {K}
    assert len(asked) == 1
    # Another kind of batch is computed anew.
    assert trimming.gains(load._replace(has_grammar=True)) == {}
    assert set(trimming.gains(load)) == {K} and len(asked) == 2


def test_trimming_gain_is_known_while_trees_are_verified(trimming):
    """Regression: by average acceptance alone, trees were kept where trimmed chains
    are better."""
    load, unlike = Load(N, N, 100.0), make_output(0.99, K, K + 1)
    unlike.chances[::2] = 0.2
    add_trees(trimming)
    of_averages = latest_gains(trimming, load)
    trimming.take(make_step(), unlike)
    gains = latest_gains(trimming, load)
    assert gains[K] > of_averages[K]
    trimming.take(make_step(num_drafts=2 * K), SimpleNamespace(chances=None))
    assert latest_gains(trimming, load) == gains


@pytest.mark.parametrize("every", [2, 4])
def test_gain_counts_only_steps_that_can_be_trimmed(trimming, every: int):
    """Regression: with a prompt in every other step, drafts were as long as if all
    steps were trimmed, and 10 % of throughput was lost."""
    add_trees(trimming)
    load = Load(N, N, 100.0)
    whole = latest_gains(trimming, load)[K]
    for _ in range(3 * REMEMBERED):
        for at in range(every):
            trimming.budget(UNLIKE if at == 0 else make_step())
    found, share = latest_gains(trimming, load)[K], (every - 1) / every
    # A step takes 1, or 1 / (1 + whole) if it is trimmed.
    seconds = 1 - share + share / (1 + whole)
    assert found == pytest.approx(1 / seconds - 1, rel=0.05)
    for _ in range(6 * REMEMBERED):
        trimming.budget(make_step())
    assert latest_gains(trimming, load)[K] == pytest.approx(whole, rel=0.01)


@pytest.mark.parametrize("num_drafts", [0, 2 * K])
def test_steps_without_chains_do_not_count_in_share(trimming, num_drafts: int):
    add_trees(trimming)
    load = Load(N, N, 100.0)
    whole = latest_gains(trimming, load)
    for _ in range(REMEMBERED):
        trimming.budget(make_step(num_drafts=num_drafts))
    assert latest_gains(trimming, load) == whole


UNLIKE = make_step()
UNLIKE.num_scheduled_tokens["0"] = 20  # a prompt
SHORT = make_step()
SHORT.scheduled_spec_decode_tokens["0"] = [-1]
SHORT.num_scheduled_tokens["0"] = 2
OTHERS = {
    "a prompt among them": UNLIKE,
    "one with fewer drafts": SHORT,
    "no drafts": make_step(num_drafts=0),
    "a length that was not timed, near max_model_len": make_step(num_drafts=K - 1),
    "a grammar": make_step(has_structured_output_requests=True),
}


@pytest.mark.parametrize("step", OTHERS.values(), ids=OTHERS)
def test_other_steps_are_not_trimmed(trimming, step):
    assert trimming.budget(step) is None


OTHER_LOADS = {
    "few requests": Load(7, 7, 100.0),
    "a request without drafts": Load(N, N - 1, 100.0),
    "a grammar": Load(N, N, 100.0, has_grammar=True),
}


@pytest.mark.parametrize("load", OTHER_LOADS.values(), ids=OTHER_LOADS)
def test_no_gain_where_nothing_is_trimmed(trimming, load):
    assert trimming.gains(load) == {}
    assert trimming.budget(make_step()) is None


def test_unverified_drafts_count_as_invalid_spec_tokens(trimming):
    step = make_step(verify_budget=N)
    trimming.take(step, make_output(0.5, 1, 1))
    assert step.num_invalid_spec_tokens == dict.fromkeys(NAMES, K - 1)
    untrimmed = make_step()
    trimming.take(untrimmed, make_output(0.5, K, 1))
    assert untrimmed.num_invalid_spec_tokens is None


class Worker(WorkersTrimming):
    """Worker-side trimming of N requests, without a device.

    Attributes:
        told: the steps whose probabilities were reported.
        learnt: an entry for each step that the estimator learned from.
    """

    def __init__(self) -> None:
        self.num_speculative_steps, self.told, self.learnt = K, [], []
        self._sampler = SimpleNamespace()
        self._estimator = SimpleNamespace(
            step=lambda *_: self.learnt.append(True), forget=self.learnt.clear
        )
        self._is_known, self._refuses = np.zeros((2, N), dtype=bool)
        self._chances = torch.zeros(N, K)
        self._context, self._least = None, N
        self._max_total_logits, self.num_bonus_tokens = 10**6, 1
        self._cu_num_logits, self.query_start_loc = torch.zeros(
            2, N + 1, dtype=torch.int32
        ).unbind()

    def run(
        self, name: str, num_next: int, drafts: int, num_reqs: int = N, **more
    ) -> SimpleNamespace:
        more = {"reports_chances": True} | more
        self.for_step(make_step(num_spec_tokens_to_schedule=num_next, **more))
        batch = SimpleNamespace(
            num_reqs=num_reqs,
            idx_mapping=torch.arange(num_reqs),
            idx_mapping_np=np.arange(num_reqs),
            num_draft_tokens_per_req=np.full(num_reqs, drafts) if drafts else None,
            seq_lens_cpu_upper_bound=torch.arange(N + 1),
        )
        output = SimpleNamespace(chances=None, num_rejected=None)
        self.end_step(output, batch, None, torch.zeros(num_reqs))
        if output.chances is not None:
            self.told.append(name)
        return output


def test_workers_report_chains_with_probabilities():
    """Neither trees nor the chains that are left of them at the end of a context."""
    worker = Worker()
    for step in (
        ("nothing drafted", K, 0),
        ("chain", 2 * K, K),
        ("tree", 2 * K, 2 * K),
        ("cut tree", K, K),
        ("shorter chain", K, 2),
        ("chain again", K, K, N - 1),
        ("one of a small batch", K, K),
    ):
        worker.run(*step)
    assert worker.told == ["chain", "shorter chain"]
    assert len(worker.learnt) == 2
    worker.run("all of a large one", 0, K)
    worker.run("drafts that were not made", K, K)
    assert worker.told[2:] == ["all of a large one"]


def test_workers_report_what_was_asked_for():
    worker = Worker()
    worker.run("nothing drafted", K, 0)
    assert worker.run("not asked", K, K, reports_chances=False).chances is None
    assert not worker.told and not worker.learnt
    assert worker.run("whole", K, K).num_rejected is None
    trimmed = worker.run("trimmed", K, K, verify_budget=N, reports_chances=False)
    assert trimmed.chances is None and len(trimmed.num_rejected) == N


def test_estimator_ignores_drafts_that_could_not_be_accepted():
    """Regression: while a third of the requests refused drafts, the estimates of all
    were a third too low for some hundred steps."""
    worker = Worker()
    worker.run("nothing drafted", K, 0)
    worker.run("a grammar", K, K, has_structured_output_requests=True)
    worker._refuses[3] = True
    worker.run("a request without drafts", K, K)
    worker._refuses[3], worker._context = False, N - 2
    worker.run("a request past the drafter's context", K, K)
    assert len(worker.told) == 3 and not worker.learnt
    worker._context = N - 1
    worker.run("all can use drafts", K, K)
    assert worker.learnt


@pytest.mark.parametrize("budget", [1, 10, N * K - 1])
def test_likeliest_drafts_of_batch_are_verified(budget: int):
    rng, worker, step = np.random.default_rng(0), Worker(), make_step()
    chances, states = rng.random((N, K), dtype=np.float32), rng.permutation(N)
    worker._chances, step.verify_budget = torch.from_numpy(chances), budget
    assert worker.for_step(step) is worker
    drafts = step.scheduled_spec_decode_tokens
    assert worker.get_num_tokens(step.num_scheduled_tokens, drafts) == N + budget
    found = worker.reallocate_drafts(NAMES, torch.from_numpy(states))
    cu_num_logits, starts, num_drafts, _ = found
    survival = chances.cumprod(axis=1)
    least = np.sort(survival, axis=None)[-budget]
    wanted = (survival[states] >= least).sum(axis=1)
    assert num_drafts == budget == wanted.sum()
    assert (cu_num_logits.diff() - 1).tolist() == wanted.tolist()
    assert starts.tolist() == cu_num_logits.tolist()


def test_synthetic_steps_leave_no_state():
    """Regression: the estimator learned from the random drafts of steps that were
    timed at start."""
    worker = Worker()
    runner = SimpleNamespace(
        trimming=worker,
        vllm_config=SimpleNamespace(
            model_config=SimpleNamespace(seed=0),
            parallel_config=SimpleNamespace(data_parallel_index=0),
        ),
    )
    worker.run("nothing drafted", K, 0)
    worker.run("chain", K, K)
    assert worker.learnt
    leave_no_trace(SimpleNamespace(model_runner=runner))
    assert not worker.learnt
    worker.run("drafts that were not made", K, K)
    assert worker.told == ["chain"]


@pytest.mark.parametrize(
    "verified, sampled, drafts",
    [(0, 1, [0, 1]), (1, 2, [1, 2]), (1, 1, []), (3, 4, [])],
)
def test_probabilities_are_kept_for_drafts_after_accepted_ones(
    trimming, verified: int, sampled: int, drafts: list[int]
):
    output = make_output(0.5, verified, sampled)
    output.chances[:] = range(K)
    trimming.take(make_step(verify_budget=N), output)
    assert [*trimming.unverified.get("0", ())] == drafts


@pytest.mark.parametrize("sampled, known", [(1, 2), (2, 3), (4, 3)])
def test_only_probabilities_that_depend_on_text_are_used(
    trimming, sampled: int, known: int
):
    """Of rejected drafts only the first and the next one: later ones are sampled again
    with the same noise."""
    trimming.take(make_step(), make_output(0.123, K, sampled))
    (chances,) = trimming._known(["0"])
    assert (chances[:known] == np.float32(0.123)).all()
    average = np.float32(trimming._acceptance.rates(ALL_GREEDY))
    assert (chances[known:] == average[known:]).all()


# Where trimming is not supported.

ATTENTION = "SomeAttention"


def runner_with(monkeypatch, is_default: bool) -> SimpleNamespace:
    """A model runner whose attention backend needs query lengths on the host."""
    monkeypatch.setattr(
        workers_trimming,
        "get_query_lens_mismatch_unsupported_backend",
        lambda groups: ATTENTION,
    )
    spec = SimpleNamespace(
        drafter=DrafterConfig(
            "eagle3", K, is_unified=True, is_trimmed_by_default=is_default
        ),
        enable_adaptive_verification=True,
    )
    graphs = SimpleNamespace(has_full_cudagraphs=lambda: True)
    return SimpleNamespace(
        vllm_config=SimpleNamespace(speculative_config=spec),
        speculator=SimpleNamespace(
            draft_attn_layer_names=set(), predict_nothing=lambda: None
        ),
        rejection_sampler=SimpleNamespace(enable_adaptive_verification=True),
        compilation_config=SimpleNamespace(cudagraph_mode=graphs),
        attn_groups=[],
        is_last_pp_rank=True,
    )


def test_unsupported_attention_is_refused_or_disables_the_default(
    monkeypatch, caplog_vllm
):
    with pytest.raises(ValueError, match=f"does not support {ATTENTION}: choose"):
        make_trimming(runner_with(monkeypatch, is_default=False))
    runner = runner_with(monkeypatch, is_default=True)
    with caplog_vllm.at_level("INFO", logger="vllm"):
        assert make_trimming(runner) is None
    assert f"batches does not support {ATTENTION}." in caplog_vllm.text
    assert not trims(runner.vllm_config.speculative_config)
    assert not runner.rejection_sampler.enable_adaptive_verification
