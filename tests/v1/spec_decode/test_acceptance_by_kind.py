# SPDX-License-Identifier: Apache-2.0
"""Acceptance of greedy and of sampled requests, separately and in mixed batches."""

import pytest

from vllm.sampling_params import SamplingParams
from vllm.v1.spec_decode.dynamic.acceptance import LOST_ALONE, Verified
from vllm.v1.spec_decode.dynamic.acceptance_by_kind import (
    ALL_GREEDY,
    FIRST_TOKENS,
    NUM_KINDS,
    AcceptanceByKind,
    kind_of,
)

K = 3
GREEDY, WARM, HOT, *FIRST = range(NUM_KINDS)
NO_FIRST = (0.0, 0.0, 0.0)
ALL_HOT = (0.0, 0.0, 1.0, *NO_FIRST)
MIXED = (0.5, 0.0, 0.5, *NO_FIRST)


@pytest.mark.parametrize(
    "temperature, kind", [(0.0, GREEDY), (0.3, WARM), (0.6, WARM), (0.8, HOT), (2, HOT)]
)
def test_kind_of_a_request(temperature: float, kind: int):
    params = SamplingParams(temperature=temperature)
    assert kind_of(params, FIRST_TOKENS) == kind
    assert kind_of(params, FIRST_TOKENS - 1) == FIRST[kind]
    assert kind_of(None, FIRST_TOKENS) == GREEDY


def known(steps: int = 300) -> AcceptanceByKind:
    """All drafts of greedy requests were accepted, and none of hot ones."""
    found = AcceptanceByKind(K, trees={7: K})
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
        tokens = 1 + accepted * (1 - LOST_ALONE)  # all were verified in trees
        assert expected[K] == pytest.approx(tokens, abs=0.1)
    # Only greedy requests have their first draft accepted.
    assert found.rates(MIXED) == pytest.approx([0.5, 1, 1], abs=0.05)
    for shares in (ALL_GREEDY, ALL_HOT):
        (chains,) = found.chains(shares)
        assert found.rates(shares) == pytest.approx(chains.rates())


def test_unseen_kind_uses_prior():
    found, new = known(), AcceptanceByKind(K, trees={7: K})
    warm = (0.0, 1.0, 0.0, *NO_FIRST)
    assert found.expected_tokens(warm) == new.expected_tokens(warm)
    assert new.expected_tokens(warm) == new.expected_tokens()


def test_acceptance_of_absent_kinds_does_not_fade():
    found = known()
    before = found.expected_tokens(ALL_GREEDY), found.expected_tokens(ALL_HOT)
    for _ in range(5000):
        found.end_steps(ALL_GREEDY)
    assert found.expected_tokens(ALL_HOT) == before[1]
    assert found.expected_tokens(ALL_GREEDY) != before[0]
