# SPDX-License-Identifier: Apache-2.0
"""The draft length follows load and acceptance, in a simulation with known values."""

from collections import deque
from itertools import accumulate, pairwise
from operator import mul

import numpy as np
import pytest

from vllm.config.drafter.length import candidate_lengths
from vllm.v1.spec_decode.auto.acceptance import Verified
from vllm.v1.spec_decode.auto.chooser import BUDGET, Chooser, Load
from vllm.v1.spec_decode.auto.times import LEAST_STEPS

CONTEXT, SIZES = 256, (1, 2, 4, 8, 16, 32, 64)
# Additional time of a draft pass without a CUDA graph: there is none if a step verifies
# and drafts different numbers of tokens.
SWITCH_MS = 1.5


def target_ms(num_tokens: int) -> float:
    """Memory-bound, then compute-bound: 5 ms for one token, 11 ms for 256."""
    memory, compute = 5.0 + 0.008 * num_tokens, 0.043 * num_tokens
    return (memory**4 + compute**4) ** 0.25


def parallel_ms(n: int, k: int) -> float:
    """P-EAGLE: one draft pass over the verified tokens and the masks."""
    return target_ms(n * (k + 1)) + 1.0 + 0.005 * n * (2 * k + 1)


def autoregressive_ms(n: int, k: int) -> float:
    """EAGLE-3: one pass per draft token, and one if nothing is drafted."""
    return target_ms(n * (k + 1)) + 0.6 * max(k, 1) + 0.002 * n * k


def pard_ms(n: int, k: int) -> float:
    """A drafter of an eighth of the target's size: one draft takes as long as eight."""
    return 4.6 + 0.01 * n + (1.4 + 0.05 * k if k else 0.0) + 0.004 * n * k


# Probability that a draft token is accepted if those before it were.
PUBLISHED = [0.76 - 0.03 * i for i in range(7)]
GREEDY = [0.93] * 7
SAMPLED = [max(0.45 - 0.05 * i, 0.1) for i in range(7)]
USELESS = [0.03] * 7
CURVES = {
    "published": PUBLISHED,
    "useless": USELESS,
    "perfect": [0.98] * 7,
    "cliff": [0.9] * 3 + [0.15] * 4,
}


def expected_tokens(rates: list[float]) -> list[float]:
    return list(accumulate(accumulate(rates, mul), initial=1.0))


def best_fixed(engine, n: int, rates: list[float]) -> float:
    """Tokens per ms of the best of all draft lengths, candidate or not."""
    return max(n * t / engine(n, k) for k, t in enumerate(expected_tokens(rates)))


def whole_load(n: int, context: float = CONTEXT) -> Load:
    return Load(n, n, context)


def observe(chooser: Chooser, drafted: int, accepted: int) -> None:
    """Reports that `accepted` of a chain's `drafted` tokens were accepted."""
    chooser.observe(Verified(drafted, range(1, accepted + 1), accepted))


def measured(engine, num_drafts: int = 7):
    lengths = candidate_lengths(num_drafts)
    return {CONTEXT: {n: {k: engine(n, k) / 1e3 for k in lengths} for n in SIZES}}


class Simulation:
    """An engine whose drafts are verified in the step after the one that chose them.

    The chooser learns what was accepted yet one step later, as with asynchronous
    scheduling. It has measured `times` at start, and `tells` those of served steps.
    """

    def __init__(self, engine, seed: int = 0, times=None, tells: bool = False):
        self.engine, self.tells = engine, tells
        self.chooser = Chooser(7, times or measured(engine))
        self.rng = np.random.default_rng(seed)
        self.drafted, self.last = 0, -1
        self.unseen: deque = deque([[], []])

    def run(self, n: int, rates: list[float], milliseconds: float) -> float:
        """Tokens per ms, counting expected tokens.

        The outcomes that the chooser sees are random, but its choices are judged by
        their expected value.
        """
        tokens, worth, spent = expected_tokens(rates), 0.0, 0.0
        while spent < milliseconds:
            verified = self.step(n, rates)
            spent += self.engine(n, verified)
            spent += SWITCH_MS * (self.drafted != verified)
            worth += n * tokens[verified]
        return worth / spent

    def step(self, n: int, rates: list[float]) -> int:
        """Returns how much the step verifies."""
        for drafted, accepted in self.unseen.popleft():
            observe(self.chooser, drafted, accepted)
        verified = self.drafted
        self.drafted = self.chooser.choose(whole_load(n))
        if self.tells and self.last == verified == self.drafted:
            seconds = self.engine(n, verified) / 1e3
            self.chooser.observe_seconds(n, CONTEXT, verified, seconds)
        self.last = verified
        drawn = self.rng.random((n * bool(verified), verified)) < rates[:verified]
        counts = drawn.cumprod(axis=1).sum(axis=1)
        self.unseen.append([(verified, int(count)) for count in counts])
        return verified


@pytest.mark.parametrize("engine", [parallel_ms, autoregressive_ms])
@pytest.mark.parametrize("curve", CURVES)
def test_finds_best_fixed_length(curve, engine):
    simulation, rates = Simulation(engine), CURVES[curve]
    for n in (8, 64, 1, 16):
        simulation.run(n, rates, 4_000)
        found = simulation.run(n, rates, 4_000)
        assert found >= 0.97 * best_fixed(engine, n, rates), f"{n} requests"


@pytest.mark.parametrize("engine", [parallel_ms, autoregressive_ms])
@pytest.mark.parametrize("n", [1, 32])
def test_follows_a_change_of_text_within_seconds(n, engine):
    """On a GPU two hundred steps of a single request take a second."""
    simulation = Simulation(engine)
    simulation.run(n, GREEDY, 1500 * engine(n, 7))
    for rates in (SAMPLED, GREEDY):
        simulation.run(n, rates, 200 * engine(n, 7))
        found = simulation.run(n, rates, 100 * engine(n, 7))
        assert found >= 0.93 * best_fixed(engine, n, rates)


@pytest.mark.parametrize("engine", [pard_ms, autoregressive_ms])
@pytest.mark.parametrize("n", [1, 32])
def test_useless_drafts_cost_little_and_good_ones_are_found_soon(n, engine):
    """Regression: it took thousands of steps, since trials were long and of one draft
    token."""
    steps = []
    for seed in range(5):
        simulation = Simulation(engine, seed)
        simulation.run(n, GREEDY, 300 * engine(n, 7))
        simulation.run(n, USELESS, 500 * engine(n, 7))
        found = simulation.run(n, USELESS, 3000 * engine(n, 0))
        assert found >= 0.99 * best_fixed(engine, n, USELESS)
        drafted: list[int] = []
        while sum(map(bool, drafted[-20:])) < 18 and len(drafted) < 1000:
            simulation.step(n, GREEDY)
            drafted.append(simulation.drafted)
        steps.append(len(drafted))
    assert np.mean(steps) < 300


def test_drafts_that_have_paid_are_tried_soon():
    """Drafts of every other request are accepted."""
    chooser, drafted = Chooser(7, measured(pard_ms)), {True: 0, False: 0}
    for number in range(40):
        is_good, verified = number % 2 == 0, 0
        for _ in range(120):
            if verified:
                observe(chooser, verified, verified if is_good else 0)
            verified = chooser.choose(whole_load(1))
            drafted[is_good] += verified > 0
    assert drafted[True] > 0.9 * 20 * 120


@pytest.mark.parametrize("interval", [1, 16])
def test_useless_trials_cost_their_share_of_time(interval: int):
    """Once the credit of the beginning is spent; each choice holds for an interval."""
    chooser = Chooser(3, {CONTEXT: {1: {0: 1.0, 3: 1.4}}}, interval=interval)
    drafted = []
    for _ in range(20_000 // interval):
        drafted.append(chooser.choose(whole_load(1), interval))
        if drafted[-1]:
            observe(chooser, 3, 0)
    steps = sum(map(bool, drafted[len(drafted) // 2 :])) * interval
    assert 0.3 * BUDGET < 0.4 * steps / 10_000 <= 1.1 * BUDGET


@pytest.mark.parametrize("kept", [0.0, 0.1, 0.5])
def test_drafts_are_worth_less_if_few_requests_can_use_them(kept):
    """For example past the drafter's context: such rows cost time and yield nothing."""
    simulation = Simulation(parallel_ms)
    simulation.run(32, PUBLISHED, 5_000)
    drafting = round(32 * kept)
    load = Load(32, drafting, CONTEXT)
    asked = [simulation.chooser.choose(load) for _ in range(50)]
    expected = expected_tokens(PUBLISHED)
    best = max(
        candidate_lengths(7),
        key=lambda k: (32 + drafting * (expected[k] - 1)) / parallel_ms(32, k),
    )
    assert asked.count(best) >= 44  # the others are trials
    assert best == 0 or kept == 0.5


def test_nothing_is_drafted_nor_forgotten_if_no_request_can_use_drafts():
    """Regressions: steps with three drafts were chosen if noise made them seem faster
    than without; and acceptance faded, so that useless drafts were tried again."""
    none = Load(1, 0, CONTEXT)
    assert Chooser(7, {CONTEXT: {1: {0: 2.0, 3: 1.9, 7: 3.0}}}).choose(none) == 0
    simulation = Simulation(parallel_ms)
    simulation.run(4, [0.0] * 7, 1000)
    chooser = simulation.chooser
    chooser.choose(none)
    known = chooser.acceptance.expected_tokens()
    for _ in range(1000):
        chooser.choose(none)
    assert chooser.acceptance.expected_tokens() == known


@pytest.mark.parametrize(
    "accepted, best", [([1, 2, 3, 12, 20], 31), ([1, 2, 3, 12], 15), ([1], 0), ([], 0)]
)
def test_tree_or_chain_is_chosen_by_what_it_accepts(accepted: list[int], best: int):
    """Nodes 12 and 20 are not among the best of their depths."""
    row = {0: 1.0, 3: 2.4, 7: 2.6, 15: 2.8, 31: 3.2}
    times, trees = {CONTEXT: {1: row, 32: row}}, {15: 7, 31: 7}
    chooser, chosen = Chooser(7, times, trees), []
    for _ in range(600):
        num_best = sum(node <= 7 for node in accepted)
        chooser.observe(Verified(31, accepted, num_best))
        chosen.append(chooser.choose(whole_load(1)))
    assert chosen[-300:].count(best) > 280
    # More rows than trees may have.
    assert chooser.choose(whole_load(32)) <= 7


@pytest.mark.parametrize("seed", range(8))
def test_no_step_that_does_less_counts_as_the_longer_one(seed: int):
    """Whatever was measured, at start or while serving."""
    chance = np.random.default_rng(seed).uniform
    plans = {CONTEXT: (0, 3, 7, 15), 4096: (0, 7, 15)}
    times = {
        c: {n: {k: chance(1, 2) for k in of} for n in (1, 8)} for c, of in plans.items()
    }
    chooser = Chooser(7, times, {15: 7})
    for _ in range(50):
        for plan in plans[CONTEXT]:
            chooser.observe_seconds(8, CONTEXT, plan, chance(1, 2))
    for context in (0, 9000):
        row = chooser._offer(whole_load(8, context)).seconds
        assert row[0] == min(row.values()) and row[3] <= row[7]
    rows = [chooser.times.seconds(n) for n in range(1, 12)]
    assert all(few[k] <= more[k] for few, more in pairwise(rows) for k in few)


def serve_without_drafts(chooser: Chooser, *sizes: int) -> None:
    for n in sizes:
        for _ in range(LEAST_STEPS):
            seconds = chooser.times.seconds(n, CONTEXT)[0]
            chooser.observe_seconds(n, CONTEXT, 0, seconds)


def test_gain_is_relative_to_fastest_step():
    """Regression: on a busy machine a step without drafts was measured as slower."""
    chooser = Chooser(3, {CONTEXT: {1: {0: 0.08, 1: 0.03, 3: 0.03}}})
    chooser.choose(whole_load(1)), chooser.choose(whole_load(1))
    assert not chooser.gain.weight  # before a step without drafts was served
    serve_without_drafts(chooser, 1)
    assert [chooser.choose(whole_load(1)) for _ in range(2)] == [3, 3]
    tokens = chooser.acceptance.expected_tokens()[3]
    assert chooser.gain.mean == pytest.approx(tokens)
    for plan, seconds in [(3, 0.03), (0, 0.045)] * 20:  # nor while serving
        chooser.observe_seconds(1, CONTEXT, plan, seconds)
    chooser.choose(whole_load(1)), chooser.choose(whole_load(1), elapsed=1000)
    assert chooser.gain.mean == pytest.approx(tokens)


def test_gain_is_time_saved_over_recent_steps():
    """Steps are weighted by their time; a choice that holds counts for each of them."""
    chooser = Chooser(3, {CONTEXT: {1: {0: 1.0, 3: 1.2}, 8: {0: 1.0, 3: 20.0}}})
    serve_without_drafts(chooser, 1, 8)
    tokens = chooser.acceptance.expected_tokens()[3]
    assert chooser.choose(whole_load(1)) == 3
    chooser.choose(whole_load(8), elapsed=4)
    assert chooser.gain.mean == pytest.approx(tokens / 1.2)
    chooser.choose(whole_load(8)), chooser.choose(whole_load(8), elapsed=100)
    assert chooser.gain.mean == pytest.approx(1.0, abs=0.01)


@pytest.mark.parametrize("longer", [1.0, 1.2])
def test_gain_corrects_mistimed_step_without_drafts(longer: float):
    """Other load at start made the measured step without drafts longer."""
    times = measured(parallel_ms)
    for row in times[CONTEXT].values():
        row[0] *= longer
    simulation = Simulation(parallel_ms, times=times, tells=True)
    undrafted = [simulation.step(1, GREEDY) == 0 for _ in range(8000)]
    # The gain depends on the time of steps without drafts: some are served.
    assert 5 <= sum(undrafted) < 0.006 * 8000 and 100 < undrafted.index(True, 9) < 2000
    ratio = parallel_ms(1, 0) / parallel_ms(1, 7)
    wanted = expected_tokens(GREEDY)[7] * ratio
    assert simulation.chooser.gain.mean == pytest.approx(wanted, rel=0.04)


def test_finds_best_plan_despite_wrong_measurements():
    """By times of served steps, if those at start were measured on a busy machine."""
    found = {False: [], True: []}
    for n, seed, tells in ((n, s, t) for n in (1, 8) for s in range(4) for t in found):
        rng, times = np.random.default_rng(seed), measured(parallel_ms)
        for row in times[CONTEXT].values():
            row |= {k: seconds * rng.uniform(1.0, 1.25) for k, seconds in row.items()}
        simulation = Simulation(parallel_ms, seed, times, tells)
        simulation.run(n, PUBLISHED, 8_000)
        worth = simulation.run(n, PUBLISHED, 2_000)
        found[tells].append(worth / best_fixed(parallel_ms, n, PUBLISHED))
    assert min(found[False]) < 0.97  # otherwise the test shows nothing
    assert min(found[True]) > 0.97
