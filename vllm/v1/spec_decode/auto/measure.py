# SPDX-License-Identifier: Apache-2.0
"""Times the steps of all plans at start, by context and number of requests.

The steps run after warm-up. They are the engine's own, from the input batch to the
drafts: target, logits, rejection sampling, drafter, and the host's work. Their requests
are dummies, and so is their cached context.
"""

import time
from collections.abc import Callable, Iterator
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import numpy as np
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
from .times import Row, Table

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
# Steps that are timed: of few rows, and of many, which take longer than what disturbs
# them.
TIMED_STEPS, LARGE_STEPS = 4, 2
# Time that measurements may take. A GPU needs about two seconds for one context and
# three for the others; the rest is for a host that is busy with other engines. On a CPU
# a step's time is proportional to its rows: few sizes tell the others.
BUDGET_SECONDS = 2.0 if current_platform.is_cpu() else 10.0
# Of kept times, those that are compared with today's: of one request all, of the others
# the shortest draft and the longest. Kernels are compiled for a number that is 1, a
# multiple of 16, or another, and for a draft length, but none for a pair of the two.
# From the factor on, all are measured anew.
CHECKED, TOO_LONG = (1, 2, 16), 1.25

Measure = Callable[..., float]


def measure_steps(executor: "Executor", reuse: bool = True) -> None:
    """Times all plans of "auto", and stores the times in the speculative config for the
    scheduler.

    Args:
        executor: decides for all its workers; times their steps.
        reuse: takes the times of an earlier start, if there are any that hold.
    """
    config, rpc = executor.vllm_config, executor.collective_rpc
    # A worker may not trim, depending on its attention backend, and has logged why.
    trimming = rpc(lambda worker: worker.model_runner.trimming is not None)
    is_trimmed = trims(config.speculative_config) and all(trimming)
    path = kept.file_of(config, is_trimmed, rpc(kept.fingerprint))

    def measure(*step: float | None) -> float:
        """Seconds on the slowest worker; see `seconds_per_step`."""
        return max(rpc(seconds_per_step, args=step))

    times = kept.load(path) if reuse else None
    if times is None or not still_hold(times, measure):
        times = measure_all(config, measure, is_trimmed)
        kept.save(path, times)
    rpc(reset_after_timing)
    config.speculative_config.step_times = times


def still_hold(times: StepTimes, measure: Measure) -> bool:
    """Whether no step of a few requests takes much less time than was kept: other load
    makes steps seem longer, and none shorter.

    What is run also compiles and loads the kernels of all plans, for which the first
    requests would wait.
    """
    rows, trimmed = times.passes.get(CONTEXT, {}), times.trimmed or {}
    steps = {}
    for n in CHECKED:
        row = rows.get(n, {})
        fit = [k for k in row if n * (k + 1) <= MAX_TREE_ROWS]
        some = fit if n == 1 else fit[1:2] + fit[-1:]
        steps |= {(n, k, CONTEXT, None): row[k] for k in some}
    for n, row in [*trimmed.items()][:1]:
        # The second of them compiles what the estimator of acceptance learns with.
        steps |= {(n, int(max(row)), CONTEXT, p): row[p] for p in sorted(row)[:2]}
    too_long = (s > TOO_LONG * measure(*step, 1) for step, s in steps.items())
    if is_wrong := any(too_long):
        logger.warning("Steps are timed anew: other load made those kept longer.")
    return not is_wrong


def measure_all(config: "VllmConfig", measure: Measure, is_trimmed: bool) -> StepTimes:
    """Times steps that verify all their drafts and, of large batches, part of the
    longest chains, which also compiles and loads the kernels of trimmed steps.

    At a short context from one request on, twice as many each time, while the budget
    lasts; then at a longer one. Of several requests every second length is timed.
    """
    spec = config.speculative_config
    lengths, depth = chosen_lengths(spec), spec.drafter.num_speculative_tokens
    # The time that a longer context adds is nearly linear in the verified tokens.
    few = sorted({lengths[0], depth, lengths[-1]})
    logger.info("Timing steps that draft %s tokens.", ", ".join(map(str, lengths)))
    # Data-parallel ranks in lockstep must all measure the same.
    is_alone = config.parallel_config.data_parallel_size == 1
    budget = BUDGET_SECONDS if is_alone else float("inf")
    times: Table = {CONTEXT: {}}
    begin, longest = time.perf_counter(), 0.0
    for context, n in loads(config):
        now = time.perf_counter()
        # A step takes at most twice as long with twice as many requests.
        if now - begin + 2 * longest > budget and times[CONTEXT]:
            break
        wanted = lengths if context == CONTEXT else few
        # Trees of too many rows to pay have no CUDA graph: estimated, not measured.
        small = [k for k in wanted if k <= depth or n * (k + 1) <= MAX_TREE_ROWS]
        timed = small if n == 1 else every_second(small, depth)
        found: Row = {k: measure(n, k, context) for k in timed}
        row = {k: estimate(k, found, depth) for k in wanted}
        times.setdefault(context, {})[n] = row
        # The first steps compile.
        longest = time.perf_counter() - now if n > 1 else 0.0
    trimmed = None
    if is_trimmed:
        large = [n for n in times[CONTEXT] if n >= least_trimmed(spec)]
        parts = [0.5, *(float(length) for length in candidate_lengths(depth) if length)]
        trimmed = {n: {p: measure(n, depth, CONTEXT, p) for p in parts} for n in large}
    sizes = ", ".join(
        f"{'/'.join(map(str, rows))} requests of {context} tokens"
        for context, rows in times.items()
    )
    seconds = time.perf_counter() - begin
    logger.info("Measured steps of %s in %.1f seconds.", sizes, seconds)
    return StepTimes(times, trimmed)


def every_second(lengths: list[int], depth: int) -> list[int]:
    """No drafts; and of chains, up to `depth`, and of trees the first, every second one
    after it, and the last."""
    chains = [k for k in lengths if 0 < k <= depth]
    kinds = lengths[:1], chains, [k for k in lengths if k > depth]
    return sorted({k for kind in kinds for k in kind[::2] + kind[-1:]})


def estimate(length: int, found: Row, depth: int) -> float:
    """Seconds of a length: on the line between those measured, or, of trees past them,
    in proportion to the rows."""
    if length <= max(found):
        return float(np.interp(length, [*found], [*found.values()]))
    return found[depth] * (length + 1) / (depth + 1)


def loads(config: "VllmConfig") -> Iterator[tuple[int, int]]:
    """Contexts and numbers of requests to measure, in order: at a short context powers
    of two, and the largest; then at a longer one what fits, if it is much longer."""
    cache, scheduler = config.cache_config, config.scheduler_config
    # A drafter's queries may leave buffers for fewer requests than can be scheduled.
    active = scheduler.max_num_active_seqs or scheduler.max_num_seqs
    largest = min(active, scheduler.max_num_batched_tokens, MAX_REQUESTS)
    powers = (1 << bits for bits in range(largest.bit_length()))
    yield from ((CONTEXT, n) for n in dict.fromkeys([*powers, largest]))
    room = float((cache.num_gpu_blocks or 0) * cache.block_size)
    if config.parallel_config.data_parallel_size > 1:
        # Cache sizes of other ranks are not known here; requests may share blocks.
        largest, room = 1, float("inf")
    rows = 1 + config.speculative_config.drafter.num_verified
    longest = config.model_config.max_model_len - (2 + TIMED_STEPS) * rows - 2
    context = min(LONG_CONTEXT, longest)
    if 2 * context >= 3 * CONTEXT:
        sizes = (n for n in LONG_SIZES if n <= largest and n * context <= room)
        yield from ((context, n) for n in sizes)


# On the workers. What they import is imported where it is needed: the engine's process,
# which sends these functions, has no runner.


def seconds_per_step(
    worker: "WorkerBase",
    num_reqs: int,
    num_drafts: int,
    context: int,
    num_verified: float | None = None,
    timed_steps: int = TIMED_STEPS,
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
    requests = _Requests(runner, num_reqs, num_drafts, context, timed_steps)
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
        done = SchedulerOutput.make_empty()
        done.finished_req_ids = set(requests.req_ids)
        worker.execute_model(done)
    finally:
        runner.kv_connector.set_disabled(False)
    return begin.elapsed_time(end) / 1e3 / requests.timed_steps


def reset_after_timing(worker: "WorkerBase") -> None:
    """Restores the state after warm-up: sampling and verification must not depend on
    the measurements, and the memory of the largest steps is freed. From now on, vLLM's
    monitor reports what is compiled."""
    runner = worker.model_runner
    index = runner.vllm_config.parallel_config.data_parallel_index
    set_random_seed(runner.vllm_config.model_config.seed, index)
    if runner.trimming is not None:
        runner.trimming.forget()
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()
        worker._maybe_activate_jit_monitor(is_timed=True)


class _Requests:
    """Dummy requests in the middle of their output, and their next steps."""

    def __init__(
        self,
        runner: "GPUModelRunner",
        num_reqs: int,
        num_drafts: int,
        context: int,
        timed_steps: int,
    ):
        self.runner, self.num_drafts = runner, num_drafts
        self.verify_budget: int | None = None
        # A small token budget limits the verified drafts, as when scheduling.
        budget = runner.vllm_config.scheduler_config.max_num_batched_tokens
        self.query_len = min(num_drafts, budget // num_reqs - 1) + 1
        if num_reqs * self.query_len > MAX_TREE_ROWS:
            timed_steps = min(timed_steps, LARGE_STEPS)
        room = runner.max_model_len - 2
        self.timed_steps = max(1, min(timed_steps, room // self.query_len - 1))
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
        ends = [*accumulate(counts, initial=index * sum(counts))]
        # Block 0 is the null block.
        return tuple(
            [1 + number % (config.num_blocks - 1) for number in range(*of)]
            for of in pairwise(ends)
        )
