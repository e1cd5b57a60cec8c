# SPDX-License-Identifier: Apache-2.0
"""Acceptance estimates: of chains, trees and kinds of requests, and how they fade."""

import numpy as np
import pytest

from vllm.v1.spec_decode.auto import acceptance
from vllm.v1.spec_decode.auto.acceptance import (
    ALL_GREEDY,
    NUM_KINDS,
    Acceptance,
    PlanAcceptance,
    Verified,
    kind_of,
)


def chain(drafted: int, accepted: int, unverified=()) -> Verified:
    return Verified(drafted, range(1, accepted + 1), accepted, unverified)


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
    estimate, whole = PlanAcceptance(depth), PlanAcceptance(depth)
    for _ in range(400):
        text = rng.beta(1.2, 0.6, (n, 1))  # how easy each request is to predict
        probs = rng.beta(6 * text, 6 * (1 - text) + 1e-3, (n, depth))
        accepted = (rng.random((n, depth)) < probs).cumprod(1).sum(1)
        reached = probs.cumprod(1)
        verified = (reached > np.quantile(reached, 1 - share)).sum(1)
        for row, drafts, found in zip(probs, verified, accepted, strict=True):
            behind = row[drafts : drafts + 2] if found >= drafts else ()
            estimate.observe(chain(int(drafts), int(min(found, drafts)), behind))
            whole.observe(chain(depth, int(found)))
        estimate.end_steps()
        whole.end_steps()
    found, right = (each.expected_tokens()[depth] for each in (estimate, whole))
    assert found == pytest.approx(right, rel=0.06)


def test_observations_fade_as_long_as_there_are_new_ones():
    estimate = PlanAcceptance(1)
    for _ in range(200):
        estimate.observe(chain(1, 1))
        estimate.end_steps()
    before = estimate.rates()
    estimate.end_steps(5000)
    assert estimate.rates() == before and before[0] > 0.97
    for _ in range(10 * acceptance.HALF_LIFE):
        estimate.observe(chain(1, 0))
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
        found.observe(Verified(7, [1, 2, 3], 3), kind=GREEDY)
        found.observe(Verified(7, [], 0), kind=HOT)
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


def test_acceptance_of_absent_kinds_does_not_fade():
    found = known()
    before = found.expected_tokens(ALL_GREEDY), found.expected_tokens(ALL_HOT)
    for _ in range(500):
        found.observe(Verified(7, [1], 1), kind=GREEDY)
        found.end_steps(ALL_GREEDY)
    assert found.expected_tokens(ALL_HOT) == before[1]
    assert found.expected_tokens(ALL_GREEDY) != before[0]
