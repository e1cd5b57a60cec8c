# SPDX-License-Identifier: Apache-2.0
"""A fall of acceptance below its usual level is logged once, with the numbers."""

import time
from types import SimpleNamespace

import numpy as np
import pytest

from vllm.config.drafter import DrafterConfig
from vllm.v1.spec_decode import acceptance_watch
from vllm.v1.spec_decode.acceptance_watch import BLOCK, AcceptanceWatch
from vllm.v1.spec_decode.accepted_nodes import AcceptedNodes
from vllm.v1.spec_decode.step_metrics import StepDrafting

K, LIMIT = 4, 2048
REQUEST = SimpleNamespace(num_tokens=10)
# Acceptance probabilities of each draft token: acceptance lengths 3.36 and 1.65.
GOOD, BAD = 0.8, 0.4
WARM, FALL = 40_000, 20_000  # drafts


@pytest.fixture
def clock(monkeypatch):
    """Replaces `time.monotonic`; stands still until a test advances it."""
    now = SimpleNamespace(seconds=0.0)
    monkeypatch.setattr(time, "monotonic", lambda: now.seconds)
    return now


class Served:
    """Feeds the watch with verified drafts, one every `seconds`."""

    def __init__(self, clock, seconds: float = 0.1, depth: int = K):
        self.watch = AcceptanceWatch("a/drafter", depth, LIMIT)
        self.clock, self.seconds, self.rng = clock, seconds, np.random.default_rng(0)

    def run(self, times: int, rate: float, lengths=(K,)) -> None:
        accepted = self.rng.geometric(1 - rate, times) - 1
        for i, number in enumerate(accepted.tolist()):
            self.clock.seconds += self.seconds
            drafted = lengths[i % len(lengths)]
            self.watch.observe(drafted, min(number, drafted), REQUEST)


def test_fall_is_logged_once_with_numbers(clock, caplog_vllm):
    served = Served(clock)
    served.run(WARM, GOOD)
    assert served.watch.relative == pytest.approx(1, abs=0.05)
    served.run(FALL, BAD)
    (record,) = caplog_vllm.records
    assert 0.75 > served.watch.relative > 0.5
    assert "of drafts of 4 tokens by a/drafter" in record.getMessage()
    recent, usual = record.args[:2]
    assert recent / usual < 0.75 and usual == pytest.approx(3.2, abs=0.1)


def test_next_fall_is_logged_again(clock, caplog_vllm):
    served = Served(clock)
    for _ in range(2):
        served.run(2 * WARM, GOOD)
        served.run(FALL, BAD)
    assert len(caplog_vllm.records) == 2


@pytest.mark.parametrize("lengths", [(1,), (2, 3), (K,)])
def test_other_draft_length_is_not_a_fall(clock, caplog_vllm, lengths):
    """Regression: a plain average fell with shorter drafts, of which fewer tokens are
    accepted."""
    served = Served(clock)
    served.run(WARM, GOOD)
    served.run(FALL, GOOD, lengths)
    assert served.watch.relative == pytest.approx(1, abs=0.05)
    assert not caplog_vllm.records


def test_fall_is_found_with_shorter_drafts(clock, caplog_vllm):
    """If little is accepted, "auto" drafts less."""
    served = Served(clock)
    served.run(WARM, GOOD)
    served.run(FALL, 0.2, lengths=(1,))
    assert len(caplog_vllm.records) == 1
    assert served.watch.relative < 0.75


def test_short_burst_of_large_batch_is_not_a_fall(clock, caplog_vllm, monkeypatch):
    """However many drafts a burst has: its requests may begin with the same text."""
    monkeypatch.setattr(acceptance_watch, "DRAFTS", 16)
    monkeypatch.setattr(acceptance_watch, "SECONDS", 1.0)
    served = Served(clock, seconds=1e-4)
    served.run(2 * WARM, GOOD)
    served.run(512, BAD)
    assert served.watch.relative > 0.9 and not caplog_vllm.records


def test_no_fall_before_enough_observations(clock, caplog_vllm):
    served = Served(clock)
    served.run(4000, GOOD)
    served.run(FALL, BAD)
    assert not caplog_vllm.records


def test_tree_is_observed_by_its_chain(clock):
    """Nodes outside of the chain are not compared."""
    watch = AcceptanceWatch("a/drafter", K, LIMIT)
    for _ in range(BLOCK):
        tree = AcceptedNodes([1, 6, 9], [0, 1, 0], K)
        watch.observe(15, 3, REQUEST, tree)
    assert watch._recent.length(2) == pytest.approx(2.0)


def test_small_tree_does_not_count_at_depths_that_it_does_not_have(clock):
    watch = AcceptanceWatch("a/drafter", K, LIMIT, depth_of=lambda num_drafts: 2)
    for _ in range(BLOCK):
        watch.observe(11, 2, REQUEST, AcceptedNodes([1, 2], [0, 0], K))
    assert watch._recent.reached.astype(bool).tolist() == [True] * 2 + [False] * (K - 2)
    assert watch._recent.length(2) == pytest.approx(3.0)


def test_nothing_is_reported_past_drafter_context(clock):
    watch = AcceptanceWatch("a/drafter", K, LIMIT)
    for _ in range(BLOCK):
        watch.observe(K, 0, SimpleNamespace(num_tokens=LIMIT))
    watch.tell(step := StepDrafting("draft_model", "pard", K))
    assert step.relative_acceptance_length is None


@pytest.mark.parametrize(
    "is_unified, trimmed, depth", [(True, False, K), (True, True, 1), (False, 0, None)]
)
def test_only_unified_speculator_is_watched(is_unified, trimmed, depth):
    """With trimming, only the first draft token of each request is compared."""
    drafter = DrafterConfig("draft_model", K, is_unified=is_unified)
    spec = SimpleNamespace(
        model="a", drafter=drafter, enable_adaptive_verification=trimmed
    )
    config = SimpleNamespace(speculative_config=spec)
    made = SimpleNamespace(vllm_config=config, max_model_len=LIMIT)
    watch = AcceptanceWatch.of(made)
    assert (watch and watch.depth) == depth
    config.speculative_config = None
    assert AcceptanceWatch.of(made) is None
