# SPDX-License-Identifier: Apache-2.0
"""Workers verify the likeliest drafts of a batch, and report what they know of them."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from vllm.config.drafter import DrafterConfig
from vllm.config.drafter.length import trims
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.spec_decode.auto.measure import reset_after_timing
from vllm.v1.worker.gpu.spec_decode import trimming as workers_trimming
from vllm.v1.worker.gpu.spec_decode.trimming import Trimming, make_trimming

from .batches import DEVICE

K, N = 3, 8


class Worker(Trimming):
    """Worker-side trimming of N requests.

    `learnt` has the requests of each step that the estimator learned from.
    """

    def __init__(self) -> None:
        self.num_speculative_steps, self.learnt = K, []
        self._sampler = SimpleNamespace()
        self._estimator = SimpleNamespace(
            step=lambda ids, *_: self.learnt.append(ids.tolist()),
            forget=self.learnt.clear,
        )
        self._is_known, self._refuses = np.zeros((2, N), dtype=bool)
        self._probs = torch.zeros(N, K, device=DEVICE)
        self._context, self._least = None, N
        self._max_total_logits, self.num_bonus_tokens = 10**6, 1
        self._cu_num_logits, self.query_start_loc = torch.zeros(
            2, N + 1, dtype=torch.int32, device=DEVICE
        ).unbind()

    def run(
        self, drafts: int = K, num_next: int = K, num_reqs: int = N, **more
    ) -> SimpleNamespace:
        """The output of a step that verifies `drafts` of each request, and drafts
        `num_next`."""
        step = SchedulerOutput.make_empty()
        step.num_spec_tokens_to_schedule = num_next
        for name, value in ({"report_acceptance_probs": True} | more).items():
            setattr(step, name, value)
        self.for_step(step)
        batch = SimpleNamespace(
            num_reqs=num_reqs,
            idx_mapping=torch.arange(num_reqs),
            idx_mapping_np=np.arange(num_reqs),
            num_draft_tokens_per_req=np.full(num_reqs, drafts) if drafts else None,
            seq_lens_cpu_upper_bound=torch.arange(N + 1),
        )
        output = SimpleNamespace(acceptance_probs=None, num_rejected=None)
        self.end_step(output, batch, *torch.zeros(2, num_reqs))
        return output

    def reports(self, *args, **more) -> bool:
        return self.run(*args, **more).acceptance_probs is not None


@pytest.fixture
def worker() -> Worker:
    """Has drafted chains for all requests."""
    worker = Worker()
    assert not worker.reports(drafts=0)
    return worker


def test_workers_report_chains_with_probabilities(worker: Worker):
    """Neither trees nor the chains that are left of them at the end of a context."""
    assert worker.reports(K, 2 * K)
    assert not worker.reports(2 * K, 2 * K)  # a tree
    assert not worker.reports(K, K)  # what is left of one
    assert worker.reports(2, K)
    assert not worker.reports(K, K, N - 1)  # some of them
    assert not worker.reports(K, K)  # one was drafted in a small batch
    assert worker.reports(K, 0)
    assert not worker.reports(K, K)  # these were not drafted
    assert len(worker.learnt) == 3


def test_a_few_hundred_requests_teach_the_estimator(worker: Worker, monkeypatch):
    """Regression: for more a kernel was compiled while serving."""
    monkeypatch.setattr(workers_trimming, "MOST_LEARNED", 2)
    assert worker.reports() and worker.learnt == [[0, 1]]


def test_workers_report_what_was_asked_for(worker: Worker):
    assert not worker.reports(report_acceptance_probs=False)
    assert not worker.learnt
    assert worker.run().num_rejected is None
    trimmed = worker.run(verify_budget=N, report_acceptance_probs=False)
    assert trimmed.acceptance_probs is None and len(trimmed.num_rejected) == N


def test_estimator_ignores_drafts_that_could_not_be_accepted(worker: Worker):
    """Regression: while a third of the requests refused drafts, the estimates of all
    were a third too low for some hundred steps."""
    assert worker.reports(has_structured_output_requests=True)
    worker._refuses[3] = True
    assert worker.reports()
    worker._refuses[3], worker._context = False, N - 2  # of the drafter
    assert worker.reports() and not worker.learnt
    worker._context = N - 1
    assert worker.reports() and worker.learnt


def test_synthetic_steps_leave_no_state(worker: Worker):
    """Regression: the estimator learned from the random drafts of steps that were
    timed at start."""
    config = SimpleNamespace(
        model_config=SimpleNamespace(seed=0),
        parallel_config=SimpleNamespace(data_parallel_index=0),
    )
    runner = SimpleNamespace(trimming=worker, vllm_config=config)
    assert worker.reports() and worker.learnt
    reset_after_timing(SimpleNamespace(model_runner=runner))
    assert not worker.learnt and not worker.reports()


# Where trimming is not supported.

ATTENTION = "SomeAttention"


def runner_with(monkeypatch, is_default: bool) -> SimpleNamespace:
    """A model runner whose attention backend needs query lengths on the host."""
    monkeypatch.setattr(
        workers_trimming,
        "get_query_lens_mismatch_unsupported_backend",
        lambda groups: ATTENTION,
    )
    spec = SimpleNamespace(
        drafter=DrafterConfig(
            "eagle3", K, is_unified=True, is_trimmed_by_default=is_default
        ),
        enable_adaptive_verification=True,
    )
    graphs = SimpleNamespace(has_full_cudagraphs=lambda: True)
    return SimpleNamespace(
        vllm_config=SimpleNamespace(speculative_config=spec),
        speculator=SimpleNamespace(
            draft_attn_layer_names=set(), predict_nothing=lambda: None
        ),
        rejection_sampler=SimpleNamespace(enable_adaptive_verification=True),
        compilation_config=SimpleNamespace(cudagraph_mode=graphs),
        attn_groups=[],
        is_last_pp_rank=True,
    )


def test_unsupported_attention_is_refused_or_disables_the_default(
    monkeypatch, caplog_vllm
):
    with pytest.raises(ValueError, match=f"does not support {ATTENTION}: choose"):
        make_trimming(runner_with(monkeypatch, is_default=False))
    runner = runner_with(monkeypatch, is_default=True)
    with caplog_vllm.at_level("INFO", logger="vllm"):
        assert make_trimming(runner) is None
    assert f"batches does not support {ATTENTION}." in caplog_vllm.text
    assert not trims(runner.vllm_config.speculative_config)
    assert not runner.rejection_sampler.enable_adaptive_verification
