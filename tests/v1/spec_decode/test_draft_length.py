# SPDX-License-Identifier: Apache-2.0
"""The draft length follows the load and the acceptance; simulated, so exactly known."""

import time
from collections import deque
from itertools import accumulate, pairwise
from operator import mul

import numpy as np
import pytest

from vllm.config.drafter.length import candidate_lengths
from vllm.v1.spec_decode.dynamic import draft_length
from vllm.v1.spec_decode.dynamic.draft_length import (
    AcceptanceEstimate,
    DraftLengths,
    between,
)
from vllm.v1.spec_decode.dynamic.pass_times import sizes_to_measure

# What a draft pass takes more where there is no CUDA graph: where what a step verifies
# and what it drafts differ in length.
SWITCH_MS = 1.5
CONCURRENCY = (1, 2, 3, 6, 8, 12, 16, 24, 32, 48, 64)


def target_ms(num_tokens: int) -> float:
    """Memory-bound, then compute-bound: 5 ms for one token, 11 ms for 256."""
    memory, compute = 5.0 + 0.008 * num_tokens, 0.043 * num_tokens
    return (memory**4 + compute**4) ** 0.25


def parallel_ms(n: int, k: int) -> float:
    """P-EAGLE: one pass over the verified tokens and the masks."""
    return target_ms(n * (k + 1)) + 1.0 + 0.005 * n * (2 * k + 1)


def autoregressive_ms(n: int, k: int) -> float:
    """EAGLE-3: a pass for each draft, one without any."""
    return target_ms(n * (k + 1)) + 0.6 * max(k, 1) + 0.002 * n * k


def stepped_ms(n: int, k: int) -> float:
    """CUDA graphs for multiples of 8 requests from 8 on."""
    return autoregressive_ms(n if n < 8 else -(-n // 8) * 8, k)


ENGINES = {
    "parallel": parallel_ms,
    "autoregressive": autoregressive_ms,
    "stepped": stepped_ms,
}
# Probability that a draft is accepted if those before it were.
CURVES = {
    "good": lambda k: [0.85] * k,
    "published": lambda k: [max(0.76 - 0.03 * i, 0.3) for i in range(k)],
    "bad": lambda k: [0.35] * k,
    "useless": lambda k: [0.03] * k,
    "perfect": lambda k: [0.98] * k,
    "cliff": lambda k: [0.9 if i < 3 else 0.15 for i in range(k)],
    "rising": lambda k: [min(0.5 + 0.06 * i, 0.9) for i in range(k)],
}


def expected_tokens(rates: list[float]) -> list[float]:
    return list(accumulate(accumulate(rates, mul), initial=1.0))


def best_fixed(engine, n: int, rates: list[float]) -> float:
    """Tokens per ms of the best of all draft lengths, candidate or not."""
    return max(n * t / engine(n, k) for k, t in enumerate(expected_tokens(rates)))


def measured(engine, num_drafts: int):
    lengths = candidate_lengths(num_drafts)
    sizes = [n for n in sizes_to_measure(64) if n.bit_count() == 1]
    return {n: {k: engine(n, k) / 1e3 for k in lengths} for n in sizes}


class Simulation:
    """An engine whose drafts are verified in the step after the one that chose them.

    What was accepted is known to the chooser one step later still, as with
    asynchronous scheduling.
    """

    def __init__(self, engine, num_drafts: int, seed: int = 0):
        self.engine = engine
        self.lengths = DraftLengths(num_drafts, measured(engine, num_drafts))
        self.rng = np.random.default_rng(seed)
        self.drafted = 0
        self.unseen: deque = deque([[], []])

    def run(self, n: int, rates: list[float], milliseconds: float) -> float:
        """Tokens per ms, counting what the model gives on average.

        Chance decides what the chooser sees, not what its choice is worth.
        """
        tokens, worth, spent = expected_tokens(rates), 0.0, 0.0
        while spent < milliseconds:
            for seen in self.unseen.popleft():
                self.lengths.observe(*seen)
            verified, self.drafted = self.drafted, self.lengths[n]
            self.unseen.append(self.verify(n, verified, rates))
            spent += self.engine(n, verified)
            spent += SWITCH_MS * (self.drafted != verified)
            worth += n * tokens[verified]
        return worth / spent

    def verify(self, n: int, drafted: int, rates: list[float]):
        if not drafted:
            return []
        accepted = self.rng.random((n, drafted)) < np.array(rates[:drafted])
        counts = np.cumprod(accepted, axis=1).sum(axis=1)
        return [(drafted, int(count)) for count in counts]


@pytest.mark.parametrize("num_drafts", [7, 15])
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("curve", CURVES)
def test_within_three_percent_of_the_best_fixed_length(curve, engine, num_drafts):
    rates, engine = CURVES[curve](num_drafts), ENGINES[engine]
    for n in CONCURRENCY:
        simulation = Simulation(engine, num_drafts)
        simulation.run(n, rates, 5_000)
        found = simulation.run(n, rates, 5_000)
        assert found >= 0.97 * best_fixed(engine, n, rates), f"{n} requests"


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("n", [1, 8, 32, 64])
def test_follows_a_change_of_acceptance(n, engine):
    """From useless, where a full batch wants no drafts, to good, and back."""
    engine = ENGINES[engine]
    simulation = Simulation(engine, 7)
    for curve in ("useless", "good", "cliff", "perfect", "useless"):
        rates = CURVES[curve](7)
        simulation.run(n, rates, 20_000)
        found = simulation.run(n, rates, 5_000)
        assert found >= 0.97 * best_fixed(engine, n, rates), curve


def test_follows_the_load_at_once():
    """What is learnt at one batch size serves all others."""
    rates = CURVES["published"](7)
    simulation = Simulation(parallel_ms, 7)
    simulation.run(8, rates, 10_000)
    for n in (64, 1, 32, 3, 48, 6):
        found = simulation.run(n, rates, 1_000)
        assert found >= 0.97 * best_fixed(parallel_ms, n, rates), f"{n} requests"


def test_no_drafts_at_all_can_be_the_choice():
    rates = CURVES["useless"](7)
    simulation = Simulation(parallel_ms, 7)
    simulation.run(64, rates, 5_000)
    asked = [simulation.lengths[64] for _ in range(200)]
    assert asked.count(0) > 190
    assert max(asked) == 1  # a try now and then, else it would be for good


def test_tries_cost_little_of_all_time():
    """Against the same choices without any tries."""
    rates = CURVES["useless"](7)
    for n in CONCURRENCY:
        simulation = Simulation(parallel_ms, 7)
        simulation.run(n, rates, 5_000)
        found = simulation.run(n, rates, 5_000)
        held = simulation.lengths._chosen[n]
        without = n * expected_tokens(rates)[held] / parallel_ms(n, held)
        assert found >= 0.99 * without


def test_holds_a_choice_that_noise_would_change():
    """Two lengths equally good: hysteresis keeps one of them."""
    seconds = {1: {1: 1.0, 2: (1 + 0.5 + 0.25) / 1.5}}
    lengths = DraftLengths(2, seconds)
    rng = np.random.default_rng(0)
    chosen = []
    for _ in range(4000):
        lengths[1]
        chosen.append(lengths._chosen[1])
        for _ in range(32):
            lengths.observe(2, int(rng.random() < 0.5) * (1 + int(rng.random() < 0.5)))
    changes = sum(a != b for a, b in pairwise(chosen[500:]))
    assert changes <= 10


def test_estimate_is_the_acceptance_after_those_before():
    estimate = AcceptanceEstimate(4)
    for _ in range(300):
        for drafted, accepted in ((4, 4), (4, 1), (4, 0), (2, 2)):
            estimate.observe(drafted, accepted)
    estimate.fade()
    # First: 3 of 4. Second: 2 of the 3 that reach it. Third: the only one drafted.
    assert estimate.rates() == pytest.approx([3 / 4, 2 / 3, 1, 1], abs=0.02)
    expected = [1, 1.75, 2.25, 2.75, 3.25]
    assert estimate.expected_tokens() == pytest.approx(expected, abs=0.1)


def test_unseen_positions_decline_from_the_last_seen():
    estimate = AcceptanceEstimate(4)
    for _ in range(500):
        estimate.observe(2, 1)
    estimate.fade()
    first, second, third, fourth = estimate.rates()
    assert first > 0.98 > 0.02 > second > third > fourth > 0


def test_what_was_seen_fades():
    estimate = AcceptanceEstimate(1)
    for _ in range(200):
        estimate.observe(1, 1)
        estimate.fade()
    assert estimate.rates()[0] > 0.97
    for _ in range(draft_length.HALF_LIFE):
        estimate.observe(1, 0)
        estimate.fade()
    assert estimate.rates()[0] < 0.25
    for _ in range(20 * draft_length.HALF_LIFE):
        estimate.fade()
    assert estimate.rates()[0] == pytest.approx(draft_length.PRIOR_ACCEPTANCE, abs=0.01)


def test_times_between_two_sizes_and_past_the_last():
    seconds = {1: {0: 1.0, 3: 2.0}, 5: {0: 1.4, 3: 6.0}}
    lengths = DraftLengths(3, seconds)
    assert lengths.step_seconds(5) == seconds[5]
    assert lengths.step_seconds(9) == pytest.approx({0: 1.8, 3: 10.0})
    # The chord says 1.2 and 4; nothing is under the first point.
    assert lengths.step_seconds(3) == pytest.approx({0: 1.1, 3: 3.0})
    assert DraftLengths(3, {1: {0: 1.0, 3: 2.0}}).step_seconds(7) == {0: 1.0, 3: 2.0}


def test_times_between_lie_midway_between_chord_and_neighbours():
    line = [(1, 1.0), (2, 2.0), (4, 4.0), (8, 8.0)]
    assert between(line, 2, 3) == pytest.approx(3.0)
    knee = [(1, 5.0), (2, 5.0), (4, 6.0), (8, 12.0)]  # from 5 on, 1.5 a request
    assert between(knee, 2, 3) == pytest.approx((5.5 + 5.0) / 2)
    bulge = [(1, 1.0), (2, 3.0), (4, 4.0), (8, 4.0)]
    assert between(bulge, 2, 3) == pytest.approx(3.5)
    noise = [(1, 5.0), (2, 4.9)]
    assert between(noise, 1, 4) == pytest.approx(5.0)


def test_without_times_every_draft_is_the_longest():
    lengths = DraftLengths(5, {})
    lengths.observe(5, 0)
    assert [lengths[n] for n in (1, 64)] == [5, 5]


def test_choosing_takes_far_less_than_a_millisecond():
    lengths = DraftLengths(15, measured(parallel_ms, 15))
    started = time.perf_counter()
    for step in range(200):
        n = 1 + step % 64
        lengths[n]
        for _ in range(64):
            lengths.observe(15, 6)
    assert (time.perf_counter() - started) / 200 < 1e-3
