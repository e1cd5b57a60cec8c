# SPDX-License-Identifier: Apache-2.0
"""How many drafts of a batch are verified, by step times and probabilities."""

import numpy as np
import pytest

from vllm.config.drafter.length import candidate_lengths
from vllm.v1.spec_decode.auto.acceptance import ALL_GREEDY, HALF_LIFE, Acceptance
from vllm.v1.spec_decode.auto.chooser import Load
from vllm.v1.spec_decode.auto.times import StepTimes
from vllm.v1.spec_decode.auto.verify import (
    ALL,
    MIN_GAIN,
    Budget,
    PartialSteps,
    Verifier,
)
from vllm.v1.spec_decode.graph_sizes import ROWS_APART, graph_rows

K = 7
LENGTHS = (0, 1, 2, 3, 5, 7)
SIZES = (8, 16, 32, 64, 128)


def target_seconds(rows: float) -> float:
    """Memory-bound, then compute-bound."""
    memory, compute = 5.0 + 0.008 * rows, 0.043 * rows
    return (memory**4 + compute**4) ** 0.25 / 1e3


def drafting_seconds(k: int) -> float:
    return 0.0005 + 0.0002 * k


def make_verifier(
    lengths: tuple[int, ...] = LENGTHS,  # whose steps were timed
    price: float = 0.0,  # seconds that trimming adds to a step
    most_rows: float = float("inf"),  # steps of more take three times as long
    least: int = 8,  # requests of the smallest batch that is trimmed
) -> Verifier:
    """A verifier with simulated step times."""

    def verifying(n: int, k: float) -> float:
        rows = n * (k + 1)
        return target_seconds(rows) * (3 if rows > most_rows else 1)

    times = {
        n: {k: verifying(n, k) + drafting_seconds(k) for k in lengths}
        for n in (1, *SIZES)
    }
    seconds = drafting_seconds(K) + price
    parts = [0.5, *(k for k in candidate_lengths(K) if k)]
    curves = {n: {m: verifying(n, m) + seconds for m in parts} for n in SIZES}
    partial = PartialSteps(curves, least, graph_rows)
    return Verifier(StepTimes({256: times}, K), partial, Acceptance(K))


def some_probs(n: int) -> np.ndarray:
    """[n, K], probabilities that a draft is accepted; half of the requests are easy,
    half are hard."""
    rng = np.random.default_rng(0)
    easy = np.where(np.arange(n)[:, None] % 2, 0.92, 0.35)
    return np.clip(easy + rng.normal(0, 0.05, (n, K)), 0.01, 0.99)


def some_reached(n: int) -> np.ndarray:
    """The same, and all drafts before it."""
    return some_probs(n).cumprod(axis=1)


def best(verifier: Verifier, k: int, reached: np.ndarray) -> Budget:
    """The budget if the probabilities of all drafts are known."""
    expected = 1.0 + reached[:, :k].sum() / len(reached)
    return verifier._compute(k, reached[:, :k], expected, 256)


def throughput(reached: np.ndarray, budget: int | None, k: int) -> float:
    """Reference: the likeliest drafts of the batch, and the time of their rows."""
    n = len(reached)
    likeliest = np.sort(reached[:, :k], axis=None)[::-1]
    verified = n * k if budget is None else budget
    seconds = target_seconds(n + verified) + drafting_seconds(k)
    return (n + likeliest[:verified].sum()) / seconds


@pytest.mark.parametrize(
    "given, k",
    [
        ({}, 3),
        ({}, 7),
        ({"lengths": (7,)}, 7),
        # Regression: interpolating to steps without a graph made small batches look
        # almost free.
        ({"most_rows": 6 * 64}, 5),
        ({"most_rows": 6 * 64}, 7),
    ],
    ids=str,
)
@pytest.mark.parametrize("n", [40, 64])
def test_budget_is_nearly_optimal(n: int, given: dict, k: int):
    """Also with only one draft length, and at batch sizes that were not measured."""
    verifier, reached = make_verifier(**given), some_reached(n)
    found = best(verifier, k, reached)
    most_rows = given.get("most_rows", n * (k + 1))
    budgets = range(1, min(n * k, most_rows - n) + 1)
    most = max(throughput(reached, budget, k) for budget in budgets)
    assert throughput(reached, found.num_drafts, k) >= 0.98 * most
    if found.num_drafts is not None:
        assert (n + found.num_drafts) % ROWS_APART == 0
        assert found.gain >= MIN_GAIN


def test_cost_of_trimming_is_counted():
    """If it costs as much as it gains, nothing is trimmed; nor if all drafts are
    equally likely, and worth their rows."""
    assert best(make_verifier(), K, np.full((16, K), 0.97).cumprod(axis=1)) == ALL
    assert best(make_verifier(), 0, some_reached(16)) == ALL
    reached = some_reached(64)
    free, seconds = best(make_verifier((K,)), K, reached), target_seconds(64 * 8)
    assert 0 < free.num_drafts < 64 * K and free.gain > 0.1
    dear = best(make_verifier((K,), free.gain * seconds), K, reached)
    cheap = best(make_verifier((K,), 0.1 * free.gain * seconds), K, reached)
    assert dear == ALL
    assert 0.5 * free.gain < cheap.gain < free.gain


def test_gain_is_over_what_is_expected_of_all():
    """Not over what is reported, of drafts whose probabilities are not known."""
    verifier, reached = make_verifier(), some_reached(64)
    expected = 1.0 + reached.sum() / 64
    gains = [
        verifier._compute(K, reached, share * expected, 256).gain
        for share in (0.9, 1.0)
    ]
    assert 0.9 * (1.0 + gains[0]) == pytest.approx(1.0 + gains[1])


# What is reported.

N = 64
LOAD = Load(N, N, 256.0)


@pytest.fixture
def verifier() -> Verifier:
    return make_verifier(least=N)


def report(verifier: Verifier, probs: np.ndarray, num_tokens: int = K + 1) -> None:
    verifier.report(probs, np.full(N, num_tokens), np.full(N, K))


def gains(verifier: Verifier, load: Load = LOAD) -> dict[int, float]:
    """Of chains of 3 or 7 drafts, and trees of 15 nodes."""
    return verifier.gains(load, [0, 3, K, 15])


def test_only_chains_gain_by_trimming(verifier: Verifier):
    """By average acceptance, and more if requests are unlike each other."""
    average = gains(verifier)
    report(verifier, some_probs(N))
    found = gains(verifier)
    assert set(found) == {3, K}
    assert found[K] > average[K] and found[K] > found[3]


@pytest.mark.parametrize(
    "load",
    [
        LOAD._replace(num_reqs=N - 1, num_drafting=N - 1),
        LOAD._replace(num_drafting=N - 1),
        LOAD._replace(has_grammar=True),
    ],
    ids=["few requests", "a request without drafts", "a grammar"],
)
def test_nothing_is_trimmed_with(verifier: Verifier, load: Load):
    report(verifier, some_probs(N))
    assert gains(verifier, load) == {} and not verifier.may_trim(load)
    assert verifier.may_trim(LOAD)


@pytest.mark.parametrize("every", [2, 4])
def test_gain_counts_only_steps_that_can_be_trimmed(verifier: Verifier, every: int):
    """Regression: with a prompt in every other step, drafts were as long as if all
    steps were trimmed, and 10 % of throughput was lost."""
    report(verifier, some_probs(N))
    whole, share = gains(verifier)[K], (every - 1) / every
    for number in range(8 * HALF_LIFE):
        verifier.count(number % every > 0)
    # A step takes 1, or 1 / (1 + whole) if it is trimmed.
    seconds = 1 - share + share / (1 + whole)
    assert gains(verifier)[K] == pytest.approx(1 / seconds - 1, rel=0.05)


@pytest.mark.parametrize("num_tokens, known", [(1, 2), (2, 3), (K + 1, K)])
def test_only_probabilities_that_depend_on_text_are_used(
    verifier: Verifier, num_tokens: int, known: int
):
    """Of rejected drafts only the first and the next one: later ones are sampled again
    with the same noise."""
    report(verifier, np.full((N, K), 0.123), num_tokens)
    rates = np.array(Acceptance(K).rates(ALL_GREEDY))
    rates[:known] = 0.123
    found = verifier._reached(N, K, LOAD)
    assert found == pytest.approx(np.tile(rates.cumprod(), (N, 1)))


def test_budget_holds_until_probabilities_are_reported(verifier: Verifier):
    """Computing it takes host time, for which a trimmed step would wait."""
    report(verifier, some_probs(N))
    before = verifier.best(N, K, LOAD)
    assert 0 < before.num_drafts < N * K
    assert verifier.best(N, K, LOAD) is before
    report(verifier, np.full((N, K), 0.99))
    assert (verifier.best(N, K, LOAD).num_drafts or N * K) > before.num_drafts
