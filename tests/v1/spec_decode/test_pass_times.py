# SPDX-License-Identifier: Apache-2.0
"""Which steps are timed at start, and that workers get consistent steps."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from vllm.config.drafter import DrafterConfig
from vllm.config.drafter.length import candidate_lengths, trims
from vllm.v1.spec_decode.dynamic import pass_times
from vllm.v1.spec_decode.dynamic.pass_times import (
    CONTEXT,
    long_contexts,
    measure_pass_times,
    measure_trimmed_times,
    seconds_per_step,
    sizes_to_measure,
)
from vllm.v1.worker.gpu.spec_decode import step_clock


@pytest.mark.parametrize(
    "largest, sizes",
    [
        (1, [1]),
        (3, [1, 3, 2]),
        (20, [1, 20, 8, 4, 16, 2, 12, 6, 3]),
        (64, [1, 64, 8, 4, 16, 2, 32, 48, 24, 12, 6, 3]),
    ],
)
def test_sizes_begin_with_ends_then_middle(largest: int, sizes: list[int]):
    assert sizes_to_measure(largest) == sizes


LARGEST_SECONDS = pass_times.CPU_LARGEST_SECONDS


@pytest.fixture(autouse=True)
def without_limit_of_a_cpu(monkeypatch):
    monkeypatch.setattr(pass_times, "CPU_LARGEST_SECONDS", 1e9)


class FakeExecutor:
    """Two workers, the second one slower, that take minutes for a step."""

    def __init__(
        self,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 512,
        max_model_len: int = 512,
        num_gpu_blocks: int = 1000,
        ranks: int = 1,
    ):
        self.trimming = ["some", "some"]
        self.num_forgotten, self.timed = 0, []
        self.vllm_config = SimpleNamespace(
            speculative_config=SimpleNamespace(
                num_speculative_tokens=3,
                num_speculative_tokens_per_batch_size="auto",
                drafter=DrafterConfig("draft_model", 3, is_unified=True),
                enable_adaptive_verification=True,
            ),
            cache_config=SimpleNamespace(num_gpu_blocks=num_gpu_blocks, block_size=16),
            model_config=SimpleNamespace(max_model_len=max_model_len),
            parallel_config=SimpleNamespace(data_parallel_size=ranks),
            scheduler_config=SimpleNamespace(
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max_num_batched_tokens,
            ),
        )

    def collective_rpc(self, method, args=()):
        if method is pass_times.leave_no_trace:
            self.num_forgotten += 1
            return None
        if method is not seconds_per_step:
            runners = (SimpleNamespace(trimming=found) for found in self.trimming)
            return [method(SimpleNamespace(model_runner=each)) for each in runners]
        self.timed.append((method, *args))
        num_reqs, *rest = args
        return [num_reqs + sum(rest), 2.0 * num_reqs + sum(rest)]


@pytest.mark.parametrize(
    "budget, sizes", [(512, [1, 2, 3, 4, 6, 8]), (4, [1, 2, 3, 4])]
)
def test_slowest_worker_counts(budget: int, sizes: list[int]):
    """No more requests are timed than the token budget has tokens."""
    executor = FakeExecutor(max_num_batched_tokens=budget)
    times = measure_pass_times(executor)
    assert sorted(times[CONTEXT]) == sizes
    assert executor.num_forgotten == 1
    for n, row in times[CONTEXT].items():
        assert row == {k: 2.0 * n + k + CONTEXT for k in candidate_lengths(3)}


@pytest.mark.parametrize("is_cpu", [True, False])
def test_disturbed_times_are_capped_by_larger_steps(monkeypatch, is_cpu):
    """No step is taken to be longer than one with more requests or drafts; on a GPU, to
    be much longer."""
    platform = SimpleNamespace(is_cpu=lambda: is_cpu)
    monkeypatch.setattr(pass_times, "current_platform", platform)
    # By requests and drafts; of some 260. Those of the longest chain are capped by more
    # requests alone. The last two are within 10 % of each other, not of (8, 3).
    disturbed = {(1, 0): 9.0, (2, 2): 7.0, (3, 1): 90.0, (6, 3): 24.0, (4, 3): 56.0}

    class Disturbed(FakeExecutor):
        def collective_rpc(self, method, args=()):
            found = super().collective_rpc(method, args)
            is_step = method is seconds_per_step
            return (
                [t + disturbed.get(args[:2], 0.0) for t in found] if is_step else found
            )

    times = measure_pass_times(Disturbed())[CONTEXT]
    # Capped by the times of (1, 1), (2, 3), (3, 2) and (8, 3).
    at_most = {(1, 0): 1.0, (2, 2): 1.0, (3, 1): 1.0, (6, 3): 4.0, (4, 3): 8.0}
    if not is_cpu:
        at_most |= {(1, 0): 9.0, (2, 2): 7.0, (6, 3): 24.0}
    for n, row in times.items():
        for k, seconds in row.items():
            expected = 2.0 * n + k + CONTEXT + at_most.get((n, k), 0.0)
            assert seconds == pytest.approx(expected)


def test_other_load_on_a_cpu_slows_all_plans_down(monkeypatch):
    """It begins amid the measurement, and goes on."""
    platform = SimpleNamespace(is_cpu=lambda: True)
    monkeypatch.setattr(pass_times, "current_platform", platform)

    class Busy(FakeExecutor):
        def collective_rpc(self, method, args=()):
            found = super().collective_rpc(method, args)
            is_busy = len(self.timed) > 3
            return [1.5 * t for t in found] if found and is_busy else found

    row = measure_pass_times(Busy(max_num_seqs=1))[CONTEXT][1]
    for k, seconds in row.items():
        assert seconds == pytest.approx(2.0 + k + CONTEXT, rel=0.25)
    assert row[3] / row[0] == pytest.approx((5 + CONTEXT) / (2 + CONTEXT))


CHAINS, TREES = [0, 1, 2, 3, 5, 7], [15]


def beside_shortest(noise: float, seed: int, bend: float = 0.0) -> np.ndarray:
    """Logarithms of the found step times over the true ones."""
    rng = np.random.default_rng(seed)
    true = {k: 1.0 + (k > 0) * 0.6 + 0.3 * k + bend * (k > 3) for k in CHAINS + TREES}
    found = pass_times._beside_shortest(
        CHAINS + TREES, CHAINS[-1], lambda k: true[k] * np.exp(noise * rng.normal())
    )
    return np.array([np.log(found[k] / found[0] / true[k]) for k in CHAINS + TREES])


def test_noisy_times_of_chains_on_a_cpu_are_nearer_to_a_line(monkeypatch):
    on_line = np.array([beside_shortest(0.1, seed) for seed in range(50)])
    monkeypatch.setattr(pass_times, "OFF_LINE", float("1e9"))
    seen = np.array([beside_shortest(0.1, seed) for seed in range(50)])
    assert (on_line[:, -1] == seen[:, -1]).all()  # of the tree
    # Of chains, relative to each other.
    spread = [
        (each - each.mean(axis=1, keepdims=True)).std()
        for each in (on_line[:, 1:-1], seen[:, 1:-1])
    ]
    assert spread[0] < 0.7 * spread[1]


def test_times_on_a_quiet_cpu_are_kept():
    assert beside_shortest(0.0, 0, bend=1.0) == pytest.approx(0.0)
    assert np.abs(beside_shortest(0.005, 0, bend=1.0)).max() < 0.03


def test_cpu_request_limit_ignores_compile_time(monkeypatch):
    """The first steps compile, so they do not predict the time of larger steps."""
    platform = SimpleNamespace(is_cpu=lambda: True)
    monkeypatch.setattr(pass_times, "current_platform", platform)
    monkeypatch.setattr(pass_times, "CPU_LARGEST_SECONDS", LARGEST_SECONDS)
    now = [0.0]
    clock = SimpleNamespace(perf_counter=lambda: now[0])
    monkeypatch.setattr(pass_times, "time", clock)

    class Compiling(FakeExecutor):
        def collective_rpc(self, method, args=()):
            now[0] += 1.0 if not now[0] else 0.01
            found = super().collective_rpc(method, args)
            return found and [1e-5 * t for t in found]

    assert max(measure_pass_times(Compiling())[CONTEXT]) == 8


def test_long_contexts_are_timed_for_few_lengths():
    executor = FakeExecutor(max_model_len=20_000, num_gpu_blocks=9000)
    times = measure_pass_times(executor)
    assert list(times) == [CONTEXT, 16384, 4096]
    # Eight requests of 16384 tokens fit, 131072 of 144000 tokens.
    assert sorted(times[16384]) == sorted(times[4096]) == [1, 8]
    assert sorted(times[16384][8]) == [0, 2, 3]
    assert times[16384][8][3] == 2.0 * 8 + 3 + 16384


def test_each_step_is_timed_once(monkeypatch):
    platform = SimpleNamespace(is_cpu=lambda: False)
    monkeypatch.setattr(pass_times, "current_platform", platform)
    executor = FakeExecutor(max_model_len=20_000, num_gpu_blocks=9000)
    measure_pass_times(executor)
    assert len(executor.timed) == len(set(executor.timed)) > 30


def test_trimmed_steps_are_timed_only_if_some_can_be_trimmed():
    executor = FakeExecutor(max_num_seqs=24)
    spec = executor.vllm_config.speculative_config
    passes = {CONTEXT: {n: {3: 1.0} for n in (1, 4, 8, 12, 16, 24)}}
    times = measure_trimmed_times(executor, passes)
    assert list(times) == [1, 3] and list(times[1]) == list(times[3]) == [8, 16, 24]
    for k, parts in {1: (0.5, 1), 3: (0.5, 1, 1.5, 2, 2.5, 3)}.items():
        assert times[k][8] == {m: 2.0 * 8 + k + CONTEXT + m for m in parts}
    assert executor.num_forgotten == 1
    few = {CONTEXT: {1: {3: 1.0}, 4: {3: 1.0}}}
    assert measure_trimmed_times(executor, few) == {} and trims(spec)
    executor.trimming = ["some", None]  # unsupported by one worker's attention backend
    # Otherwise the scheduler would warn that too few requests were timed.
    assert measure_trimmed_times(executor, passes) is None


@pytest.mark.parametrize(
    "max_model_len, num_gpu_blocks, points",
    [
        (300, 1000, []),
        (512, 1000, [(486, 1), (486, 8)]),
        (1024, 1000, [(998, 1), (998, 8)]),
        (8192, 10_000, [(8166, 1), (8166, 8), (4096, 1), (4096, 8)]),
        (131072, 10_000, [(16384, 1), (16384, 8), (65536, 1), (4096, 1), (4096, 8)]),
    ],
)
def test_long_contexts_fit(max_model_len, num_gpu_blocks, points):
    """Within `max_model_len`, and within the KV cache."""
    executor = FakeExecutor(max_model_len=max_model_len, num_gpu_blocks=num_gpu_blocks)
    assert list(long_contexts(executor.vllm_config, 32)) == points


@pytest.fixture(params=[False, True], ids=["gpu", "cpu"])
def is_cpu(request, monkeypatch) -> bool:
    """On both, no time is left after the ends are measured."""
    for name in ("BUDGET_SECONDS", "CPU_BUDGET_SECONDS", "CPU_LARGEST_SECONDS"):
        monkeypatch.setattr(pass_times, name, -1.0)
    platform = SimpleNamespace(is_cpu=lambda: request.param)
    monkeypatch.setattr(pass_times, "current_platform", platform)
    return request.param


def test_ends_are_measured_without_time_left(is_cpu: bool):
    """On a CPU, where time grows with each request, the upper end is lower."""
    times = measure_pass_times(FakeExecutor(max_model_len=4096))
    assert list(times) == [CONTEXT]
    assert sorted(times[CONTEXT]) == ([1, 2] if is_cpu else [1, 8])


def test_data_parallel_ranks_measure_the_same_steps(is_cpu: bool):
    """However long it takes, and whatever the size of each rank's KV cache."""
    first, second = (
        measure_pass_times(FakeExecutor(max_model_len=4096, num_gpu_blocks=n, ranks=2))
        for n in (10, 10_000)
    )
    assert first == second
    assert max(first[CONTEXT]) == (4 if is_cpu else 8) and len(first) == 2


class FakeWorker:
    """Records its steps, and after how many of them the device is synchronized."""

    def __init__(self, max_num_batched_tokens=512, max_model_len=4096, num_blocks=100):
        spec = SimpleNamespace(block_size=16)
        self.model_runner = SimpleNamespace(
            device=torch.device("cpu"),
            max_model_len=max_model_len,
            kv_connector=SimpleNamespace(set_disabled=self.set_disabled),
            kv_cache_config=SimpleNamespace(
                num_blocks=num_blocks,
                kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec)] * 2,
            ),
            vllm_config=SimpleNamespace(
                scheduler_config=SimpleNamespace(
                    max_num_batched_tokens=max_num_batched_tokens
                ),
                num_lookahead_tokens=0,
                model_config=SimpleNamespace(seed=0),
                parallel_config=SimpleNamespace(data_parallel_index=0),
            ),
            model_state=SimpleNamespace(),
        )
        self.steps, self.waited_after, self.connector = [], [], []

    def set_disabled(self, disabled: bool) -> None:
        self.connector.append(disabled)

    def execute_model(self, step) -> None:
        self.steps.append(step)

    def sample_tokens(self, grammar) -> None:
        pass

    def synchronize_device(self) -> None:
        self.waited_after.append(len(self.steps))

    def tokens_of_first(self) -> int:
        """Tokens of the first request at the end."""
        first = self.steps[0].scheduled_new_reqs[0]
        counts = (step.num_scheduled_tokens.get(first.req_id, 0) for step in self.steps)
        return first.num_computed_tokens + sum(counts)


UNTIMED = 2  # a GPU is still running them when the clock starts


@pytest.mark.parametrize(
    "device, waited_after, timed",
    [
        ("cuda", [6], pass_times.TIMED_STEPS),
        ("cpu", [3, 4], pass_times.CPU_TIMED_STEPS),
    ],
    ids=["gpu", "cpu"],
)
def test_cpu_is_synchronized_after_each_step(
    monkeypatch, device: str, waited_after: list[int], timed: int
):
    """Steps are timed one by one, as other load may disturb some of them."""
    monkeypatch.setattr(step_clock, "make_mark", lambda _: step_clock.HostMark())
    worker = FakeWorker()
    worker.model_runner.device = torch.device(device)
    assert seconds_per_step(worker, 3, 7, CONTEXT) > 0
    assert worker.waited_after == waited_after
    assert waited_after[-1] == UNTIMED + timed


@pytest.mark.parametrize("drafts", [0, 1, 7])
def test_steps_verify_drafts_of_previous_step(drafts: int):
    worker = FakeWorker()
    assert seconds_per_step(worker, 3, drafts, CONTEXT) > 0
    first, *decodes, last = worker.steps
    assert worker.connector == [True, False]

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
