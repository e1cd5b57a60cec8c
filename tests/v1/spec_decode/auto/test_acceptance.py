# SPDX-License-Identifier: Apache-2.0
"""Acceptance estimates: of chains, trees and kinds of requests, and how they fade."""

from itertools import accumulate
from operator import mul

import numpy as np
import pytest

from vllm.v1.spec_decode.auto import acceptance
from vllm.v1.spec_decode.auto.acceptance import (
    ALL_GREEDY,
    NUM_KINDS,
    Acceptance,
    ChainAcceptance,
    PlanAcceptance,
    Verified,
    kind_of,
)


def test_estimate_is_conditional_on_earlier_positions():
    estimate = ChainAcceptance(4)
    for _ in range(300):
        for drafted, accepted in ((4, 4), (4, 1), (4, 0), (2, 2)):
            estimate.observe(drafted, accepted)
    estimate.end_steps()
    # First: 3 of 4. Second: 2 of the 3 that reach it. Third: the only one drafted.
    assert estimate.rates() == pytest.approx([3 / 4, 2 / 3, 1, 1], abs=0.02)


def text_in_runs(rng: np.random.Generator, num_tokens: int) -> np.ndarray:
    """[num_tokens], how many drafts are accepted at each token.

    Easy and hard text alternate in runs, and acceptance declines with depth.
    """
    is_easy, chance = np.zeros(num_tokens, dtype=bool), rng.random(num_tokens)
    for at in range(1, num_tokens):
        is_easy[at] = chance[at] < (0.9 if is_easy[at - 1] else 0.15)
    rates = np.where(is_easy, 0.95, 0.4)[:, None] * 0.98 ** np.arange(9)
    drawn = rng.random(rates.shape) < rates
    found = np.zeros(num_tokens, dtype=int)
    for at in range(num_tokens - 9):
        diagonal = drawn[at + np.arange(9), np.arange(9)]
        found[at] = diagonal.cumprod().sum()
    return found


def serve(text: np.ndarray, num_drafts: int, kept: Acceptance | None = None):
    """Mean tokens per step, with `num_drafts` drafts in each step."""
    at = steps = 0
    while at < len(text) - 9:
        accepted = min(text[at], num_drafts)
        if kept is not None:
            drafts = Verified(num_drafts, range(1, accepted + 1), accepted)
            kept.observe(drafts, request_id="a")
            kept.end_steps(ALL_GREEDY)
        at, steps = at + accepted + 1, steps + 1
    return at / steps


@pytest.mark.parametrize("drafted", [3, 5, 8])
def test_other_lengths_are_estimated_by_runs_of_accepted_drafts(
    monkeypatch, drafted: int
):
    """Regression: long drafts made shorter ones look 8 % worse than they are, and short
    ones made longer ones look 15 % better."""
    monkeypatch.setattr(acceptance, "HALF_LIFE", 1e9)
    monkeypatch.setattr(acceptance, "MAX_DRAFTS", 1e9)
    text, kept = text_in_runs(np.random.default_rng(0), 40_000), Acceptance(8)
    serve(text, drafted, kept)
    found = kept.expected_tokens()
    for k in range(1, 9):
        high = 1.03 if k <= drafted else 1.12
        assert 0.97 < found[k] / serve(text, k) < high
    by_rates = [*accumulate(accumulate(kept.rates(ALL_GREEDY), mul), initial=1.0)]
    if drafted == 8:
        assert by_rates[3] < 0.95 * serve(text, 3)


def test_lengths_are_estimated_by_rates_of_each_depth(monkeypatch):
    """A drafter that was trained for three tokens, on text without runs."""
    monkeypatch.setattr(acceptance, "HALF_LIFE", 1e9)
    rates, rng = np.array([0.9] * 3 + [0.1] * 4), np.random.default_rng(0)
    expected = 1 + np.concatenate([[0], rates.cumprod().cumsum()])
    for drafted in (3, 7):
        kept = Acceptance(7)
        for step in range(3000):
            depth = 7 if step % 20 == 0 else drafted  # sometimes longer ones
            accepted = int((rng.random(depth) < rates[:depth]).cumprod().sum())
            drafts = Verified(depth, range(1, accepted + 1), accepted)
            kept.observe(drafts, request_id="a")
            kept.end_steps(ALL_GREEDY)
        found = [*kept.expected_tokens().values()]
        assert found == pytest.approx(expected, rel=0.06)


@pytest.mark.parametrize("has_cut_trees", [False, True])
def test_tree_gives_acceptance_of_chains_and_smaller_trees(has_cut_trees):
    """Node 5 is not the best one of its depth, so the chain ends before it.

    Near the end of the context a request has fewer nodes, or only a part of a chain,
    which says nothing about larger plans.
    """
    estimate = PlanAcceptance(4, trees={7: 4, 15: 4})
    for _ in range(500):
        estimate.observe(Verified(15, [1, 2, 5, 9], 2))
        if has_cut_trees:
            estimate.observe(Verified(9, [1, 2, 5], 2))
            estimate.observe(Verified(2, [1, 2], 2))
        estimate.end_steps()
    expected = {0: 1, 1: 2, 2: 3, 3: 3, 4: 3, 7: 4, 15: 5}
    assert estimate.expected_tokens() == pytest.approx(expected, abs=0.1)


def test_trees_of_several_passes_are_compared_with_chains_of_their_depth():
    """The tree of 7 nodes has depth 2, that of 11 depth 3; node 3 is a sibling."""
    estimate = PlanAcceptance(5, trees={7: 2, 11: 3})
    for _ in range(500):
        estimate.observe(Verified(11, [1, 3], 1))
        estimate.end_steps()
    expected = estimate.expected_tokens()
    wanted = {0: 1, 1: 2, 2: 2, 3: 2, 7: 3, 11: 3}
    found = {plan: expected[plan] for plan in wanted}
    assert found == pytest.approx(wanted, abs=0.1)
    # Deeper drafts were not verified: their acceptance is guessed from the last one's.
    assert expected[5] == pytest.approx(expected[3], abs=0.1)


@pytest.mark.parametrize("share", [0.4, 0.7])
def test_acceptance_of_all_drafts_if_only_likeliest_are_verified(share: float):
    """Regression: with 0.4 of the drafts verified, the estimate of tokens was 1.5 times
    too high."""
    n, depth, rng = 16, 7, np.random.default_rng(0)
    estimate, whole = ChainAcceptance(depth), ChainAcceptance(depth)
    for _ in range(400):
        text = rng.beta(1.2, 0.6, (n, 1))  # how easy each request is to predict
        probs = rng.beta(6 * text, 6 * (1 - text) + 1e-3, (n, depth))
        accepted = (rng.random((n, depth)) < probs).cumprod(1).sum(1)
        reached = probs.cumprod(1)
        verified = (reached > np.quantile(reached, 1 - share)).sum(1)
        for row, drafts, found in zip(probs, verified, accepted, strict=True):
            behind = row[drafts : drafts + 2] if found >= drafts else ()
            estimate.observe(int(drafts), int(min(found, drafts)), behind, run=None)
            whole.observe(depth, int(found))
        estimate.end_steps()
        whole.end_steps()
    found, right = (each.expected_tokens()[depth] for each in (estimate, whole))
    assert found == pytest.approx(right, rel=0.06)


def test_observations_fade_as_long_as_there_are_new_ones():
    estimate = ChainAcceptance(1)
    for _ in range(200):
        estimate.observe(1, 1)
        estimate.end_steps()
    before = estimate.rates()
    estimate.end_steps(5000)
    assert estimate.rates() == before and before[0] > 0.97
    for _ in range(10 * acceptance.HALF_LIFE):
        estimate.observe(1, 0)
        estimate.end_steps()
    assert estimate.rates()[0] < 0.05


# Kinds of requests.

K = 3
GREEDY, WARM, HOT = range(NUM_KINDS)
ALL_HOT, MIXED = (0.0, 0.0, 1.0), (0.5, 0.0, 0.5)


@pytest.mark.parametrize(
    "temperature, kind", [(0.0, GREEDY), (0.3, WARM), (0.6, WARM), (0.8, HOT), (2, HOT)]
)
def test_kind_of_a_request(temperature: float, kind: int):
    assert kind_of(temperature) == kind


def known(steps: int = 300) -> Acceptance:
    """All drafts of greedy requests were accepted, and none of hot ones."""
    found = Acceptance(K, trees={7: K})
    for _ in range(steps):
        found.observe(Verified(7, [1, 2, 3], 3), kind=GREEDY, request_id="a")
        found.observe(Verified(7, [], 0), kind=HOT, request_id="b")
        found.end_steps(MIXED)
    return found


def test_batch_gets_mean_of_its_requests():
    found = known()
    for shares, accepted in ((ALL_GREEDY, K), (ALL_HOT, 0), (MIXED, K / 2)):
        expected = found.expected_tokens(shares)
        assert [*expected] == [0, 1, 2, 3, 7] and expected[0] == 1
        assert expected[K] == pytest.approx(1 + accepted, abs=0.1)
    # Only greedy requests have their first draft accepted.
    assert found.rates(MIXED) == pytest.approx([0.5, 1, 1], abs=0.05)
    for shares in (ALL_GREEDY, ALL_HOT):
        (chains,) = found.chains(shares)
        assert found.rates(shares) == pytest.approx(chains.rates())


def test_unseen_kind_uses_prior():
    found, new = known(), Acceptance(K, trees={7: K})
    warm = (0.0, 1.0, 0.0)
    assert found.expected_tokens(warm) == new.expected_tokens(warm)
    assert new.expected_tokens(warm) == new.expected_tokens()


def test_acceptance_of_absent_kinds_does_not_fade():
    found = known()
    before = found.expected_tokens(ALL_GREEDY), found.expected_tokens(ALL_HOT)
    for _ in range(500):
        found.observe(Verified(7, [1], 1), kind=GREEDY, request_id="a")
        found.end_steps(ALL_GREEDY)
    assert found.expected_tokens(ALL_HOT) == before[1]
    assert found.expected_tokens(ALL_GREEDY) != before[0]
