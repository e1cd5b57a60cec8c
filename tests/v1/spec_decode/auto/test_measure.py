# SPDX-License-Identifier: Apache-2.0
"""Which steps are timed at start, and that workers get consistent steps."""

from types import SimpleNamespace

import pytest
import torch

from vllm.config import ObservabilityConfig
from vllm.config.drafter import DrafterConfig
from vllm.config.drafter.length import candidate_lengths
from vllm.utils import jit_monitor
from vllm.v1.spec_decode.auto import kept, measure
from vllm.v1.spec_decode.auto.measure import (
    CONTEXT,
    LARGE_STEPS,
    TIMED_STEPS,
    estimate,
    every_second,
    measure_all,
    measure_steps,
    seconds_per_step,
)
from vllm.v1.worker.gpu_worker import Worker


def make_config(
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 512,
    max_model_len: int = 512,
    num_gpu_blocks: int = 1000,
    ranks: int = 1,
    max_num_active_seqs: int | None = None,
    num_nodes: int | None = None,
) -> SimpleNamespace:
    return SimpleNamespace(
        speculative_config=SimpleNamespace(
            num_speculative_tokens=3,
            num_speculative_tokens_per_batch_size="auto",
            drafter=DrafterConfig(
                "draft_model", 3, num_nodes=num_nodes, is_unified=True
            ),
            enable_adaptive_verification=True,
        ),
        cache_config=SimpleNamespace(num_gpu_blocks=num_gpu_blocks, block_size=16),
        model_config=SimpleNamespace(max_model_len=max_model_len),
        parallel_config=SimpleNamespace(data_parallel_size=ranks),
        scheduler_config=SimpleNamespace(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_active_seqs=max_num_active_seqs,
        ),
    )


def seconds(
    n: int, k: int, context: int, verified: float | None = None, timed_steps: int = 4
) -> float:
    return n + k + context + (verified or 0.0)


@pytest.fixture(autouse=True)
def kept_times(monkeypatch, tmp_path):
    """The file that keeps the times of a start."""
    path = tmp_path / "times.json"
    monkeypatch.setattr(kept, "file_of", lambda *_: path)
    monkeypatch.setattr(kept, "fingerprint", lambda worker: "machine")
    return path


class FakeExecutor:
    """Two workers, the first one faster; the time of a step is known."""

    def __init__(self, load: float = 1.0, **how: int):
        self.vllm_config, self.load = make_config(**how), load
        self.trimming, self.num_resets, self.timed = ["some", "some"], 0, []

    def collective_rpc(self, method, args=()):
        if method is measure.reset_after_timing:
            self.num_resets += 1
        elif method is not seconds_per_step:
            runners = (SimpleNamespace(trimming=found) for found in self.trimming)
            return [method(SimpleNamespace(model_runner=each)) for each in runners]
        else:
            self.timed.append(args)
            return [0.5 * seconds(*args), self.load * seconds(*args)]


@pytest.mark.parametrize(
    "first, later, kept_of", [(1.0, 1.2, 1.0), (1.2, 1.0, 1.2), (1.3, 1.0, 1.0)]
)
def test_later_start_runs_each_kind_of_step_once(first, later, kept_of, caplog_vllm):
    """Which compiles its kernels. If the machine was busy at the first start, and is
    not now, all are measured anew."""
    measure_steps(FakeExecutor(load=first))
    executor = FakeExecutor(load=later)
    measure_steps(executor)
    passes = executor.vllm_config.speculative_config.step_times.passes
    assert passes[CONTEXT][4][3] == kept_of * seconds(4, 3, CONTEXT)
    assert ("other load" in caplog_vllm.text) == (kept_of < first)
    assert executor.num_resets == 1
    if kept_of == first:
        some = {1: range(4), 2: (1, 3)}  # each length, and each class of numbers
        whole = [(n, k, CONTEXT, None, 1) for n in some for k in some[n]]
        trimmed = [(8, 3, CONTEXT, part, 1) for part in (0.5, 1.0)]
        assert executor.timed == [*whole, *trimmed]


def test_trimmed_steps_are_timed_only_if_some_can_be_trimmed():
    for most, sizes in ((24, [8, 16, 24]), (4, [])):
        found = measure_all(make_config(max_num_seqs=most), seconds, True)
        assert list(found.trimmed) == sizes
    executor = FakeExecutor(max_num_seqs=24)
    executor.trimming = ["some", None]  # unsupported by one worker's attention backend
    measure_steps(executor, reuse=False)
    # Otherwise the scheduler would warn that too few requests were timed.
    assert executor.vllm_config.speculative_config.step_times.trimmed is None


@pytest.mark.parametrize(
    "how, times",
    [
        ({"max_model_len": 300}, {CONTEXT: [1, 2, 4, 8, 16, 32]}),
        ({"max_num_batched_tokens": 4}, {CONTEXT: [1, 2, 4], 486: [1]}),
        ({"max_model_len": 512}, {CONTEXT: [1, 2, 4, 8, 16, 32], 486: [1, 8]}),
        # A tree's nodes are verified too.
        (
            {"max_model_len": 1024, "num_nodes": 31},
            {CONTEXT: [1, 2, 4, 8, 16, 32], 830: [1, 8]},
        ),
        # The drafter's queries fill its buffers.
        ({"max_num_active_seqs": 4}, {CONTEXT: [1, 2, 4], 486: [1]}),
        # The KV cache has room for 32000 tokens.
        (
            {"max_model_len": 20_000, "num_gpu_blocks": 2000},
            {CONTEXT: [1, 2, 4, 8, 16, 32], 16384: [1]},
        ),
    ],
)
def test_loads_that_are_timed(how, times):
    """Within `max_model_len`, the token budget and the KV cache; of long contexts only
    a few loads and lengths."""
    found = measure_all(make_config(max_num_seqs=32, **how), seconds, False).passes
    assert {context: sorted(by_size) for context, by_size in found.items()} == times
    for context, by_size in found.items():
        lengths = candidate_lengths(3) if context == CONTEXT else [0, 3]
        assert all(sorted(row) == lengths for row in by_size.values())


@pytest.mark.parametrize(
    "budget, sizes", [(-1.0, [1]), (5.4, [1, 2]), (11.4, [1, 2, 4])]
)
def test_measuring_ends_before_the_budget_is_exceeded(monkeypatch, budget, sizes):
    """A step of n requests takes a fourth of n seconds. Of one request four lengths are
    timed, of others three; those of one request also compile."""
    now = [0.0]
    clock = SimpleNamespace(perf_counter=lambda: now[0])
    monkeypatch.setattr(measure, "time", clock)
    monkeypatch.setattr(measure, "BUDGET_SECONDS", budget)

    def timed(n: int, k: int, context: int) -> float:
        now[0] += n / 4
        return 1.0

    assert sorted(measure_all(make_config(), timed, False).passes[CONTEXT]) == sizes


def test_lengths_between_those_that_are_timed():
    """No line connects a step without drafts and one with a draft pass, nor a chain of
    eight and a tree of eleven nodes, which takes fewer passes."""
    lengths = [0, 1, 2, 3, 4, 5, 7, 8, 11, 15, 19, 23, 27, 31]
    timed = every_second(lengths, 8)
    assert timed == [0, 1, 3, 5, 8, 11, 19, 27, 31]
    found = {k: float(k * k if k <= 8 else 10 + k) for k in timed}
    assert estimate(2, found, 8) == (1 + 9) / 2 and estimate(8, found, 8) == 64
    assert all(estimate(k, found, 8) == 10 + k for k in lengths if k > 8)
    assert estimate(63, found, 8) == 64 * 64 / 9  # in proportion to its rows


def test_data_parallel_ranks_measure_the_same_steps(monkeypatch):
    """However long it takes, and whatever the size of each rank's KV cache."""
    monkeypatch.setattr(measure, "BUDGET_SECONDS", -1.0)
    first, second = (
        measure_all(
            make_config(max_model_len=4096, num_gpu_blocks=n, ranks=2), seconds, False
        ).passes
        for n in (10, 10_000)
    )
    assert first == second and max(first[CONTEXT]) == 8 and len(first) == 2


class FakeWorker:
    """Records its steps, and after how many of them the device is synchronized; it has
    vLLM's own way to switch its monitor on."""

    _maybe_activate_jit_monitor = Worker._maybe_activate_jit_monitor
    observability_config = ObservabilityConfig()

    def __init__(self, max_num_batched_tokens=512, max_model_len=4096, num_blocks=100):
        self.steps, self.waited_after, self.connector = [], [], []
        self.execute_model = self.steps.append
        spec = SimpleNamespace(block_size=16)
        self.model_runner = SimpleNamespace(
            device=torch.device("cpu"),
            max_model_len=max_model_len,
            kv_connector=SimpleNamespace(set_disabled=self.connector.append),
            kv_cache_config=SimpleNamespace(
                num_blocks=num_blocks,
                kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec)] * 2,
            ),
            vllm_config=SimpleNamespace(
                scheduler_config=SimpleNamespace(
                    max_num_batched_tokens=max_num_batched_tokens
                ),
                num_lookahead_tokens=0,
                kernel_config=SimpleNamespace(enable_jit_warmup=True),
                model_config=SimpleNamespace(seed=0),
                parallel_config=SimpleNamespace(data_parallel_index=0),
            ),
            model_state=SimpleNamespace(),
            trimming=None,
        )
        self.vllm_config = self.model_runner.vllm_config

    def sample_tokens(self, grammar) -> None:
        pass

    def synchronize_device(self) -> None:
        self.waited_after.append(len(self.steps))

    def tokens_of_first(self) -> int:
        """Tokens of the first request at the end."""
        first = self.steps[0].scheduled_new_reqs[0]
        counts = (step.num_scheduled_tokens.get(first.req_id, 0) for step in self.steps)
        return first.num_computed_tokens + sum(counts)


@pytest.mark.parametrize("drafts", [0, 1, 7])
def test_steps_verify_drafts_of_previous_step(drafts: int):
    worker = FakeWorker()
    assert seconds_per_step(worker, 3, drafts, CONTEXT) > 0
    first, *decodes, last = worker.steps
    assert worker.connector == [True, False]
    assert worker.waited_after == [2 + TIMED_STEPS]  # they are timed back to back

    assert len(first.scheduled_new_reqs) == 3
    computed = {r.req_id: r.num_computed_tokens for r in first.scheduled_new_reqs}
    assert set(first.num_scheduled_tokens.values()) == {1}
    before = first
    for step in decodes:
        cached = step.scheduled_cached_reqs
        for req_id, known in zip(
            cached.req_ids, cached.num_computed_tokens, strict=True
        ):
            computed[req_id] += before.num_scheduled_tokens[req_id]
            assert known == computed[req_id]
            verified = step.scheduled_spec_decode_tokens.get(req_id, [])
            assert len(verified) == drafts == before.num_spec_tokens_to_schedule
            assert step.num_scheduled_tokens[req_id] == drafts + 1
        assert step.total_num_scheduled_tokens == 3 * (drafts + 1)
        before = step
    assert last.finished_req_ids == set(computed)
    assert last.total_num_scheduled_tokens == 0


def test_fewer_steps_of_many_rows_are_timed():
    worker = FakeWorker()
    seconds_per_step(worker, 64, 7, CONTEXT)
    assert worker.waited_after == [2 + LARGE_STEPS]


@pytest.mark.parametrize("num_blocks", [30, 1000])
def test_tokens_have_blocks_other_than_null_block(num_blocks: int):
    worker = FakeWorker(num_blocks=num_blocks)
    seconds_per_step(worker, 4, 7, CONTEXT)
    new = worker.steps[0].scheduled_new_reqs
    ids = [block for request in new for group in request.block_ids for block in group]
    assert 0 < min(ids) <= max(ids) < num_blocks
    assert (len(set(ids)) == len(ids)) == (num_blocks == 1000)
    tokens = worker.tokens_of_first()
    assert all(16 * len(group) >= tokens for group in new[0].block_ids)


@pytest.mark.parametrize("max_model_len", [34, 40, 300])
def test_steps_stay_within_a_short_context(max_model_len: int):
    worker = FakeWorker(max_model_len=max_model_len)
    seconds_per_step(worker, 2, 15, CONTEXT)
    assert worker.tokens_of_first() <= max_model_len


def test_small_token_budget_limits_verified_drafts():
    worker = FakeWorker(max_num_batched_tokens=8)
    seconds_per_step(worker, 3, 7, CONTEXT)
    for step in worker.steps[1:-1]:
        assert step.total_num_scheduled_tokens == 6
        assert step.num_spec_tokens_to_schedule == 7


@pytest.mark.parametrize("verified, budget", [(None, None), (1, 8), (3, 23)])
def test_verified_part_is_budget_of_each_step(verified, budget):
    worker = FakeWorker()
    seconds_per_step(worker, 8, 3, CONTEXT, verified)
    first, *decodes, last = worker.steps
    assert {step.verify_budget for step in decodes} == {budget}
    assert first.verify_budget is last.verify_budget is None


@pytest.mark.parametrize("schedule", ["auto", None])
def test_compiling_counts_as_warm_up_until_steps_are_timed(schedule, monkeypatch):
    """Regression: `--jit-monitor-mode=error` ended a first start."""
    armed: list[bool] = []
    monkeypatch.setattr(jit_monitor, "activate", lambda **_: armed.append(True))
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)
    worker = FakeWorker()
    spec = SimpleNamespace(num_speculative_tokens_per_batch_size=schedule)
    worker.vllm_config.speculative_config = spec
    worker._maybe_activate_jit_monitor()  # at the end of vLLM's warm-up
    assert armed == ([] if schedule else [True])
    if schedule:
        measure.reset_after_timing(worker)
        assert armed == [True]
