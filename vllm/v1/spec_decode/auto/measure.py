# SPDX-License-Identifier: Apache-2.0
"""Times the steps of all plans at start, by context and number of requests.

The steps run after warm-up. They are the engine's own, from the input batch to the
drafts: target, logits, rejection sampling, drafter, and the host's work. Their requests
are dummies, and so is their cached context.
"""

import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch

from vllm.config.drafter import StepTimes
from vllm.config.drafter.length import (
    MAX_TREE_ROWS,
    candidate_lengths,
    chosen_lengths,
    least_trimmed,
    trims,
)
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.sampling_params import SamplingParams
from vllm.utils.torch_utils import set_random_seed
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput

from . import kept
from .times import Curves, Row, Table

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.executor.abstract import Executor
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner
    from vllm.v1.worker.worker_base import WorkerBase

logger = init_logger(__name__)

MAX_REQUESTS = 256  # larger batches are extrapolated
CONTEXT = 256  # tokens of each request before the step
# A longer context, and numbers of requests there.
LONG_CONTEXT, LONG_SIZES = 16384, (1, 8, 64)
TIMED_STEPS = 4
# Time that measurements may take. A GPU needs about two seconds for one context and
# three for the others; the rest is for a host that is busy with other engines. On a CPU
# a step's time is proportional to its rows: few sizes tell the others.
BUDGET_SECONDS = 2.0 if current_platform.is_cpu() else 10.0

Measure = Callable[..., float]


def measure_steps(executor: "Executor", reuse: bool = True) -> None:
    """Times all plans of "auto", and stores the times in the speculative config for the
    scheduler.

    Args:
        executor: decides for all its workers; times their steps.
        reuse: takes the times of an earlier start, if there are any.
    """
    config = executor.vllm_config
    spec = config.speculative_config
    # If the workers do not trim, they have logged why.
    is_trimmed = trims(spec) and all(executor.collective_rpc(_is_trimming))
    path = kept.file_of(config, is_trimmed)
    spec.step_times = kept.load(path, chosen_lengths(spec)) if reuse else None
    if spec.step_times is not None:
        return

    def measure(*step: float | None) -> float:
        """Seconds on the slowest worker; see `seconds_per_step`."""
        return max(executor.collective_rpc(seconds_per_step, args=step))

    started = time.perf_counter()
    passes, trimmed = measure_pass_times(config, measure), None
    if is_trimmed:
        trimmed = measure_trimmed_times(config, measure, passes)
    executor.collective_rpc(reset_after_timing)
    spec.step_times = StepTimes(passes, trimmed)
    kept.save(path, spec.step_times)
    sizes = ", ".join(
        f"{'/'.join(map(str, sorted(rows)))} requests of {context} tokens"
        for context, rows in passes.items()
    )
    seconds = time.perf_counter() - started
    logger.info("Measured steps of %s in %.1f seconds.", sizes, seconds)


def measure_pass_times(config: "VllmConfig", measure: Measure) -> Table:
    """Times steps that verify all their drafts.

    At a short context from one request on, twice as many each time, while the budget
    lasts; then at a longer one.
    """
    spec = config.speculative_config
    lengths, depth = chosen_lengths(spec), spec.drafter.num_speculative_tokens
    # The time that a longer context adds is nearly linear in the verified tokens.
    few = sorted({lengths[0], depth, lengths[-1]})
    logger.info("Timing steps that draft %s tokens.", ", ".join(map(str, lengths)))

    def row(context: int, n: int, wanted: list[int]) -> Row:
        # Trees of too many rows to pay have no CUDA graph: estimated, not measured.
        small = [k for k in wanted if k <= depth or n * (k + 1) <= MAX_TREE_ROWS]
        found: Row = {k: measure(n, k, context) for k in small}
        return {k: found.get(k, found[depth] * (k + 1) / (depth + 1)) for k in wanted}

    begin = time.perf_counter()
    # Data-parallel ranks in lockstep must all measure the same.
    is_alone = config.parallel_config.data_parallel_size == 1
    budget = BUDGET_SECONDS if is_alone else float("inf")
    times: Table = {CONTEXT: {}}
    steps = [(CONTEXT, n, lengths) for n in sizes_to_measure(_most_requests(config))]
    steps += [(*point, few) for point in long_context(config)]
    longest = 0.0
    for context, n, wanted in steps:
        now = time.perf_counter()
        # A step takes at most twice as long with twice as many requests.
        if now - begin + 2 * longest > budget and times[CONTEXT]:
            break
        times.setdefault(context, {})[n] = row(context, n, wanted)
        # The first steps compile.
        longest = time.perf_counter() - now if n > 1 else 0.0
    return times


def measure_trimmed_times(
    config: "VllmConfig", measure: Measure, passes: Table
) -> Curves:
    """Times steps that verify part of the longest chains. This also compiles and loads
    the kernels of trimmed steps.

    Args:
        passes: what `measure_pass_times` returned.

    Returns:
        Seconds; empty if no batch that large was measured.
    """
    spec = config.speculative_config
    depth = spec.drafter.num_speculative_tokens
    parts = [0.5, *(float(length) for length in candidate_lengths(depth) if length)]
    return {
        n: {part: measure(n, depth, CONTEXT, part) for part in parts}
        for n in passes[CONTEXT]
        if n >= least_trimmed(spec)
    }


def _is_trimming(worker: "WorkerBase") -> bool:
    """Whether a worker trims: it may not, depending on its attention backend."""
    return worker.model_runner.trimming is not None


def _most_requests(config: "VllmConfig") -> int:
    scheduler = config.scheduler_config
    # A drafter's queries may leave buffers for fewer requests than can be scheduled.
    active = scheduler.max_num_active_seqs or scheduler.max_num_seqs
    most = min(active, scheduler.max_num_batched_tokens)
    return min(most, MAX_REQUESTS)


def sizes_to_measure(largest: int) -> list[int]:
    """Numbers of requests to measure, in order: powers of two, and the largest."""
    powers = (1 << bits for bits in range(largest.bit_length()))
    return list(dict.fromkeys([*powers, largest]))


def long_context(config: "VllmConfig") -> Iterator[tuple[int, int]]:
    """The longer context with each number of requests that fits; none if `CONTEXT` is
    about the longest."""
    cache, largest = config.cache_config, _most_requests(config)
    room = float((cache.num_gpu_blocks or 0) * cache.block_size)
    if config.parallel_config.data_parallel_size > 1:
        # Cache sizes of other ranks are not known here; requests may share blocks.
        largest, room = 1, float("inf")
    drafts = config.speculative_config.num_speculative_tokens
    longest = config.model_config.max_model_len - (2 + TIMED_STEPS) * (drafts + 1) - 2
    context = min(LONG_CONTEXT, longest)
    if 2 * context >= 3 * CONTEXT:
        for n in LONG_SIZES:
            if n <= largest and n * context <= room:
                yield context, n


# On the workers. What they import is imported where it is needed: the engine's process,
# which sends these functions, has no runner.


def seconds_per_step(
    worker: "WorkerBase",
    num_reqs: int,
    num_drafts: int,
    context: int,
    num_verified: float | None = None,
) -> float:
    """Seconds of a decode step that verifies and drafts, of several run back to back:
    the host prepares a step while the one before runs, as while serving.

    To be run on every worker at once, between warm-up and the first request.

    Args:
        num_verified: mean number of each request's drafts that are verified, less than
            all; None: all.
    """
    from vllm.v1.worker.gpu.spec_decode.step_clock import make_mark

    runner = worker.model_runner
    requests = _Requests(runner, num_reqs, num_drafts, context)
    if num_verified is not None:
        drafts = (requests.query_len - 1) * num_reqs
        requests.verify_budget = min(round(num_reqs * num_verified), drafts - 1)

    def run(step: SchedulerOutput) -> None:
        worker.execute_model(step)
        worker.sample_tokens(None)

    begin, end = (make_mark(runner.device) for _ in range(2))
    runner.kv_connector.set_disabled(True)
    try:
        run(requests.first_step())
        run(requests.next_step(report_acceptance_probs=True))  # compiles, too
        begin.record()
        for _ in range(requests.timed_steps):
            run(requests.next_step())
        end.record()
        worker.synchronize_device()
        worker.execute_model(requests.finish())
    finally:
        runner.kv_connector.set_disabled(False)
    return begin.elapsed_time(end) / 1e3 / requests.timed_steps


def reset_after_timing(worker: "WorkerBase") -> None:
    """Restores the state after warm-up: sampling and verification must not depend on
    the measurements, and the memory of the largest steps is freed."""
    runner = worker.model_runner
    config = runner.vllm_config
    set_random_seed(
        config.model_config.seed, config.parallel_config.data_parallel_index
    )
    if runner.trimming is not None:
        runner.trimming.forget()
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()


class _Requests:
    """Dummy requests in the middle of their output, and their next steps."""

    def __init__(
        self, runner: "GPUModelRunner", num_reqs: int, num_drafts: int, context: int
    ):
        self.runner, self.num_drafts = runner, num_drafts
        self.verify_budget: int | None = None
        # A small token budget limits the verified drafts, as when scheduling.
        budget = runner.vllm_config.scheduler_config.max_num_batched_tokens
        self.query_len = min(num_drafts, budget // num_reqs - 1) + 1
        room = runner.max_model_len - 2
        self.timed_steps = max(1, min(TIMED_STEPS, room // self.query_len - 1))
        num_new = (1 + self.timed_steps) * self.query_len
        self.num_computed = max(1, min(context, room - num_new))
        self.num_tokens = self.num_computed + 1 + num_new
        self.req_ids = [f"_pass_times_{i}" for i in range(num_reqs)]

    def first_step(self) -> SchedulerOutput:
        """Computes every request's last prompt token; the others count as cached."""
        step = self._step(1)
        step.scheduled_new_reqs = [self._request(i) for i in range(len(self.req_ids))]
        self.num_computed += 1
        return step

    def next_step(self, report_acceptance_probs: bool = False) -> SchedulerOutput:
        """Verifies the drafts of the step before."""
        step, count = self._step(self.query_len), len(self.req_ids)
        cached = CachedRequestData.make_empty()
        cached.req_ids = self.req_ids
        cached.num_computed_tokens = [self.num_computed] * count
        cached.num_output_tokens = [1] * count
        cached.new_block_ids = [None] * count
        step.scheduled_cached_reqs = cached
        if self.query_len > 1:
            drafts = [-1] * (self.query_len - 1)  # placeholders: the workers have them
            step.scheduled_spec_decode_tokens = dict.fromkeys(self.req_ids, drafts)
            step.verify_budget = self.verify_budget
            step.report_acceptance_probs = report_acceptance_probs
        self.num_computed += self.query_len
        return step

    def finish(self) -> SchedulerOutput:
        step = SchedulerOutput.make_empty()
        step.finished_req_ids = set(self.req_ids)
        return step

    def _step(self, query_len: int) -> SchedulerOutput:
        step = SchedulerOutput.make_empty()
        step.num_scheduled_tokens = dict.fromkeys(self.req_ids, query_len)
        step.total_num_scheduled_tokens = query_len * len(self.req_ids)
        step.num_spec_tokens_to_schedule = self.num_drafts
        return step

    def _request(self, index: int) -> NewRequestData:
        prompt = [0] * (self.num_computed + 1)
        return NewRequestData(
            req_id=self.req_ids[index],
            prompt_token_ids=prompt,
            prefill_token_ids=prompt,
            mm_features=[],
            sampling_params=SamplingParams(max_tokens=self.num_tokens),
            pooling_params=None,
            block_ids=self._blocks(index),
            num_computed_tokens=self.num_computed,
            lora_request=None,
        )

    def _blocks(self, index: int) -> tuple[list[int], ...]:
        """Blocks for all steps; shared between requests if there are too few."""
        from vllm.v1.worker.gpu.warmup import _warmup_block_counter

        config = self.runner.kv_cache_config
        block_count = _warmup_block_counter(self.runner)
        counts = [
            block_count(self.num_tokens, group.kv_cache_spec)
            for group in config.kv_cache_groups
        ]
        ids, start = [], index * sum(counts)
        for count in counts:
            # Block 0 is the null block.
            numbers = range(start, start + count)
            ids.append([1 + number % (config.num_blocks - 1) for number in numbers])
            start += count
        return tuple(ids)
