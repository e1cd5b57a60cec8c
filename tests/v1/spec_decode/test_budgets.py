# SPDX-License-Identifier: Apache-2.0
"""How many drafts of a batch are verified, by step times and probabilities."""

import time

import numpy as np
import pytest

from vllm.config.drafter.length import candidate_lengths
from vllm.v1.spec_decode.dynamic.budgets import ALL, MIN_GAIN, Budget, Budgets
from vllm.v1.spec_decode.dynamic.graph_sizes import ROWS_APART
from vllm.v1.spec_decode.dynamic.served_times import ServedTimes
from vllm.v1.spec_decode.dynamic.step_times import StepTimes

K = 7
LENGTHS = (0, 1, 2, 3, 5, 7)
HALF = 3
SIZES = (8, 16, 32, 64, 128)


def target_seconds(rows: float) -> float:
    """Memory-bound, then compute-bound."""
    memory, compute = 5.0 + 0.008 * rows, 0.043 * rows
    return (memory**4 + compute**4) ** 0.25 / 1e3


def drafting_seconds(k: int) -> float:
    return 0.0005 + 0.0002 * k


def make_budgets(
    lengths: tuple[int, ...],
    price: float,
    most_rows: float = float("inf"),
    served: ServedTimes | None = None,
) -> Budgets:
    """Budgets by simulated step times.

    Args:
        lengths: draft lengths whose steps were timed.
        price: seconds that trimming adds to a step.
        most_rows: the largest number of rows with a CUDA graph; larger steps take three
            times as long.
        served: corrections by served steps.
    """

    def verifying(n: int, k: float) -> float:
        rows = n * (k + 1)
        return target_seconds(rows) * (3 if rows > most_rows else 1)

    times = {
        n: {k: verifying(n, k) + drafting_seconds(k) for k in lengths}
        for n in (1, *SIZES)
    }

    def part_verified(drafted: int) -> dict[int, dict[float, float]]:
        seconds = drafting_seconds(drafted) + price
        verified = [0.5, *(k for k in candidate_lengths(drafted) if k)]
        return {n: {k: verifying(n, k) + seconds for k in verified} for n in SIZES}

    trimmed = {k: part_verified(k) for k in sorted({HALF, K} & set(lengths))}
    return Budgets(StepTimes({256: times}), trimmed, served)


@pytest.fixture
def budgets() -> Budgets:
    return make_budgets(LENGTHS, price=0.0)


def some_chances(n: int, seed: int = 0) -> np.ndarray:
    """[n, K], probabilities that a draft and all before it are accepted; half of the
    requests are easy, half are hard."""
    rng = np.random.default_rng(seed)
    easy = np.where(np.arange(n)[:, None] % 2, 0.92, 0.35)
    chances = np.clip(easy + rng.normal(0, 0.05, (n, K)), 0.01, 0.99)
    return chances.cumprod(axis=1)


def best(budgets: Budgets, k: int, survival: np.ndarray) -> Budget:
    """The budget if the survival of all drafts is known."""
    return budgets.best(k, survival, 1.0 + survival[:, :k].sum() / len(survival))


def throughput(chances: np.ndarray, budget: int | None, k: int) -> float:
    """Reference: the likeliest drafts of the batch, and the time of their rows."""
    n = len(chances)
    survival = np.sort(chances[:, :k], axis=None)[::-1]
    verified = n * k if budget is None else budget
    seconds = target_seconds(n + verified) + drafting_seconds(k)
    return (n + survival[:verified].sum()) / seconds


@pytest.mark.parametrize(
    "lengths, k", [(LENGTHS, 2), (LENGTHS, 3), (LENGTHS, 7), ((7,), 7)]
)
@pytest.mark.parametrize("n", [16, 32, 40, 64, 128])
def test_budget_is_nearly_optimal(n: int, lengths: tuple[int, ...], k: int):
    """Also with only one draft length, and at batch sizes that were not measured."""
    budgets, chances = make_budgets(lengths, price=0.0), some_chances(n)
    found = best(budgets, k, chances)
    most = max(throughput(chances, b, k) for b in range(1, n * k + 1))
    assert throughput(chances, found.num_drafts, k) >= 0.98 * most
    if found.num_drafts is not None:
        assert (n + found.num_drafts) % ROWS_APART == 0
        assert found.gain >= MIN_GAIN


@pytest.mark.parametrize("k", [5, 7])
def test_steps_without_graph_do_not_affect_others(k: int):
    """Regression: interpolating to their times made small batches look almost free."""
    n, chances = 64, some_chances(64)
    found = best(make_budgets(LENGTHS, price=0.0, most_rows=6 * n), k, chances)
    most = max(throughput(chances, b, k) for b in range(1, 5 * n + 1))
    assert throughput(chances, found.num_drafts, k) >= 0.98 * most


@pytest.mark.parametrize("k", [2, 3, 5, 7])
def test_times_of_other_lengths_are_adapted(k: int):
    """Drafts that are not made save their time, whatever trimming costs."""
    budgets = make_budgets(LENGTHS, price=0.001)
    rows = np.array([96, 128])
    seconds, _ = budgets._seconds(64, 256, k, rows)
    expected = [target_seconds(each) + drafting_seconds(k) + 0.001 for each in rows]
    assert seconds == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("drafted", [HALF, K])
def test_disturbed_steps_do_not_affect_larger_ones(drafted: int):
    """Regression: one slow step, as of other engines that start, made all that verify
    more look slow, so that nothing was trimmed."""
    budgets, disturbed = make_budgets(LENGTHS, 0.0), make_budgets(LENGTHS, 0.0)
    for kept in (budgets, disturbed):
        kept._trimmed.pop({HALF: K, K: HALF}[drafted])
    disturbed._trimmed[drafted].measured[0][64][1] *= 3
    rows = np.arange(64 + 32, 64 * (drafted + 1), 16)
    expected, _ = budgets._seconds(64, 256, drafted, rows)
    seconds, _ = disturbed._seconds(64, 256, drafted, rows)
    far = rows > 64 * 3  # from the next measured step on
    assert seconds[far] == pytest.approx(expected[far])
    assert seconds == pytest.approx(expected, rel=0.3)


def test_small_gains_are_ignored(budgets: Budgets):
    """All drafts are equally likely, and worth their rows."""
    assert best(budgets, K, np.full((16, K), 0.97).cumprod(axis=1)) == ALL
    assert best(budgets, 0, some_chances(16)) == ALL


def test_cost_of_trimming_is_counted():
    """If it costs as much as it gains, nothing is trimmed."""
    chances = some_chances(64)
    free, seconds = best(make_budgets((K,), 0.0), K, chances), target_seconds(64 * 8)
    assert 0 < free.num_drafts < 64 * K and free.gain > 0.1
    dear = best(make_budgets((K,), free.gain * seconds), K, chances)
    cheap = best(make_budgets((K,), 0.1 * free.gain * seconds), K, chances)
    assert dear == ALL
    assert 0.5 * free.gain < cheap.gain < free.gain


def test_gain_is_over_what_is_expected_of_all(budgets: Budgets):
    """Not over what `survival` says of drafts whose chances are not known."""
    chances = some_chances(64)
    expected = 1.0 + chances.sum() / 64
    gains = [budgets.best(K, chances, share * expected).gain for share in (0.9, 1.0)]
    assert 0.9 * (1.0 + gains[0]) == pytest.approx(1.0 + gains[1])


@pytest.mark.parametrize("slower", [1.0, 1.5])
def test_served_steps_correct_measured_times(slower: float):
    """The gain falls if only trimmed steps take longer than measured."""
    served, chances = ServedTimes(), some_chances(64)
    budgets = make_budgets(LENGTHS, price=0.0, served=served)
    before = best(budgets, K, chances)
    for _ in range(20):
        served.observe(64, 3, 1.0)
        seconds = target_seconds(64 + before.num_drafts) + drafting_seconds(K)
        budgets.observe_seconds(64, 256, K, before.num_drafts, slower * seconds)
    found = best(budgets, K, chances)
    if slower == 1.0:
        assert found.num_drafts == before.num_drafts
        assert found.gain == pytest.approx(before.gain, abs=0.02)
    else:
        assert 1.0 + found.gain < 0.85 * (1.0 + before.gain)


def test_takes_far_less_than_a_step(budgets: Budgets):
    chances = some_chances(128)
    budgets.best(K, chances, 3.0)
    started = time.process_time()
    for _ in range(50):
        budgets.best(K, chances, 3.0)
    assert (time.process_time() - started) / 50 < 2e-3
