# SPDX-License-Identifier: Apache-2.0
"""A step's stats say what it drafts, once, and whether or not drafts were verified."""

import inspect
from types import SimpleNamespace

import pytest

from vllm._upstream.v1.core.sched import scheduler as base
from vllm.config.drafter import DrafterConfig
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.spec_decode.metrics import SpecDecodingStats
from vllm.v1.spec_decode.step_metrics import StepDrafting

UPSTREAM = base.Scheduler.__mro__[1]


def scheduled(num_tokens: int = 8, draft_length: int = 2) -> SimpleNamespace:
    return SimpleNamespace(
        total_num_scheduled_tokens=num_tokens,
        num_spec_tokens_to_schedule=draft_length,
    )


@pytest.fixture
def make_scheduler(monkeypatch):
    """A scheduler whose base hands over the stats of verified drafts, or none."""

    def init(self, speculates=True, verified=None, log_stats=True) -> None:
        self.num_spec_tokens, self.log_stats = 3, log_stats
        self.verified = verified
        spec = SimpleNamespace(
            method="draft_model",
            drafter=DrafterConfig("draft_model", 3, is_parallel=True),
            num_speculative_tokens_per_batch_size=None,
        )
        config = SimpleNamespace(speculative_config=spec if speculates else None)
        self.vllm_config = config

    monkeypatch.setattr(UPSTREAM, "__init__", init)
    monkeypatch.setattr(
        UPSTREAM, "update_from_output", lambda self, *_: self.make_stats(self.verified)
    )
    monkeypatch.setattr(UPSTREAM, "make_stats", lambda self, stats: stats)
    return Scheduler


def test_step_without_verified_drafts(make_scheduler):
    scheduler, output = make_scheduler(), SimpleNamespace(step_seconds=(0.2, 0.1))
    stats = scheduler.update_from_output(scheduled(), output)
    assert stats.num_drafts == 0
    assert stats.step == StepDrafting("draft_model", "pard", 2, (0.2, 0.1))
    assert scheduler.make_stats(None) is None  # told once


def test_step_with_verified_drafts(make_scheduler):
    verified = SpecDecodingStats.new(3)
    verified.observe_draft(3, 1)
    scheduler = make_scheduler(verified=verified)
    stats = scheduler.update_from_output(scheduled(), SimpleNamespace())
    assert stats is verified
    assert stats.step == StepDrafting("draft_model", "pard", 2, None)


@pytest.mark.parametrize(
    "how, num_tokens",
    [({"speculates": False}, 8), ({"log_stats": False}, 8), ({}, 0)],
    ids=["no speculation", "no stats", "nothing ran"],
)
def test_step_that_says_nothing(make_scheduler, how, num_tokens):
    scheduler = make_scheduler(**how)
    step = scheduled(num_tokens)
    assert scheduler.update_from_output(step, SimpleNamespace()) is None


def test_the_base_passes_stats_first():
    """As the scheduler takes them."""
    assert list(inspect.signature(UPSTREAM.make_stats).parameters)[1] == (
        "spec_decoding_stats"
    )
    call = inspect.getsource(UPSTREAM.update_from_output).partition("self.make_stats(")
    assert call[2].split() and call[2].split()[0] == "spec_decoding_stats,"
