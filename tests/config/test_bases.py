# SPDX-License-Identifier: Apache-2.0
"""Features that only some vLLM releases have are used if present."""

from types import SimpleNamespace

import pytest

from vllm.config.bases import keep_targets_context, may_skip_drafts
from vllm.config.drafter import DrafterConfig
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.worker.gpu.spec_decode.unified.draft_config import draft_lengths


@pytest.fixture(params=[False, True])
def has_skip_drafts(request, monkeypatch) -> bool:
    if request.param:
        monkeypatch.setattr(SchedulerOutput, "skip_drafts", False, raising=False)
    else:
        monkeypatch.delattr(SchedulerOutput, "skip_drafts", raising=False)
    return request.param


@pytest.mark.parametrize(
    "schedule, lengths", [(None, [7]), ([(1, 4, 7), (5, 8, 3)], [3, 7])]
)
def test_draft_lengths_with_skipped_drafts(
    has_skip_drafts: bool, schedule, lengths: list[int]
):
    spec = SimpleNamespace(
        num_speculative_tokens=7,
        num_speculative_tokens_per_batch_size=schedule,
        uses_dynamic_speculative_decoding=lambda: schedule is not None,
    )
    assert may_skip_drafts() is has_skip_drafts
    scheduler = SimpleNamespace(max_num_seqs=8)
    engine = SimpleNamespace(speculative_config=spec, scheduler_config=scheduler)
    assert draft_lengths(engine) == [0] * has_skip_drafts + lengths


@pytest.mark.parametrize(
    "unsupported, cut",
    [
        (None, False),
        ("method dflash", True),
    ],
)
def test_target_keeps_max_model_len(unsupported: str | None, cut: bool):
    """A release that cuts it to the drafter's may do so for its own speculators."""

    class Config(SimpleNamespace):
        was_cut = False

        def _limit_max_model_len_to_draft(self) -> None:
            self.was_cut = True

    keep_targets_context(Config)
    drafter = DrafterConfig("eagle3", 3, unsupported=unsupported)
    config = Config(speculative_config=SimpleNamespace(drafter=drafter))
    config._limit_max_model_len_to_draft()
    assert config.was_cut == cut
