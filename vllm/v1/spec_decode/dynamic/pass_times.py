# SPDX-License-Identifier: Apache-2.0
"""How long a step takes, by context, number of requests and draft length.

Measured at warm-up. The steps are the engine's own, from the input batch to the drafts:
target, logits, rejection sampling, drafter, and what the host adds. Their requests are
made up, and so are the tokens of their cached context.
"""

import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch

from vllm.config.drafter.length import (
    MAX_TREE_ROWS,
    MIN_REQUESTS,
    candidate_lengths,
    chosen_lengths,
    trims,
)
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.sampling_params import SamplingParams
from vllm.utils.torch_utils import set_random_seed
from vllm.v1.core.sched.output import (
    CachedRequestData,
    NewRequestData,
    SchedulerOutput,
)

from .step_times import PassTimes, Row

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.executor.abstract import Executor
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner
    from vllm.v1.worker.worker_base import WorkerBase

logger = init_logger(__name__)

MAX_REQUESTS = 256  # more are extrapolated
CONTEXT = 256  # tokens that each request has behind it
# Longer ones, in the order of what they tell, and numbers of requests there.
LONG_CONTEXTS = (16384, 65536, 4096)
LONG_SIZES = (1, 8, 64)
TIMED_STEPS = 4
# Drafts verified of each request, up to which trimmed steps are timed at halves, too.
SHORT = 4
# Rows that the drafter is timed to catch up on, if few enough steps bring as many.
CATCH_UP_ROWS = 256
CATCH_UP_STEPS, CPU_CATCH_UP_STEPS = 32, 16
# After which nothing more is begun. A GPU needs about two seconds for one context and
# three for the others; more is for a host that is busy, with other engines that start.
BUDGET_SECONDS = 10.0
CPU_BUDGET_SECONDS = 2.0
# What the steps of the most requests may take there, were they one after the other.
CPU_LARGEST_SECONDS = 4.0
IN_STEP_CPU_REQUESTS = 4


def measure_steps(executor: "Executor") -> None:
    """Times all that "auto" chooses between, and puts it into the speculative config,
    where the scheduler finds it."""
    spec = executor.vllm_config.speculative_config
    spec.pass_times = measure_pass_times(executor)
    spec.catch_up_seconds = measure_catch_up(executor)
    spec.trimmed_times = measure_trimmed_times(executor)


def measure_pass_times(executor: "Executor") -> PassTimes:
    """Times steps on all workers; the slowest worker counts.

    At a short context one request and the most requests are always measured, numbers
    between them while the budget lasts, and then longer contexts. On a CPU, where a
    step takes as long as its requests together, the most are as many as the budget
    allows.
    """
    config = executor.vllm_config
    lengths = chosen_lengths(config.speculative_config)
    depth = config.speculative_config.drafter.num_speculative_tokens
    logger.info("Timing steps that draft %s tokens.", ", ".join(map(str, lengths)))

    def measure(context: int, size: int, wanted: list[int] = lengths) -> Row:
        row: Row = {}
        for length in wanted:
            if length > depth and size * (length + 1) > MAX_TREE_ROWS:
                # Its rows are too many to pay, and have no graph: as long as that.
                row[length] = row[depth] * (length + 1) / (depth + 1)
                continue
            args = (size, length, context)
            row[length] = max(executor.collective_rpc(seconds_per_step, args=args))
        return row

    started = time.perf_counter()
    times: PassTimes = {CONTEXT: {1: measure(CONTEXT, 1)}}
    budget, is_cpu = BUDGET_SECONDS, current_platform.is_cpu()
    seconds = 0.0
    if is_cpu:
        # Once more, since the first ones compile.
        budget, begin = CPU_BUDGET_SECONDS, time.perf_counter()
        again, row = measure(CONTEXT, 1), times[CONTEXT][1]
        times[CONTEXT][1] = {length: min(row[length], again[length]) for length in row}
        seconds = time.perf_counter() - begin
    largest = _most_requests(config, seconds)
    if config.parallel_config.data_parallel_size > 1:
        budget = float("inf")  # ranks in step with each other all measure the same
    # Attention adds what it reads, which is close to linear in the tokens verified.
    chains = [length for length in lengths if length <= depth]
    few = sorted({chains[0], chains[len(chains) // 2], depth, lengths[-1]})
    steps = [(CONTEXT, size, lengths) for size in sizes_to_measure(largest)[1:]]
    steps += [(*point, few) for point in long_contexts(config, largest)]
    for number, (context, size, some) in enumerate(steps):
        if number and time.perf_counter() - started > budget:
            break
        times.setdefault(context, {})[size] = measure(context, size, some)
    executor.collective_rpc(leave_no_trace)
    if is_cpu:
        times = {context: _at_most_larger(sizes) for context, sizes in times.items()}
    _log_measured(times, len(lengths), time.perf_counter() - started)
    return times


def _at_most_larger(by_size: dict[int, Row]) -> dict[int, Row]:
    """Step times of which none is longer than that of more requests or drafts.

    On a CPU whatever else runs makes some steps seem longer than they are, and none
    shorter. Without this a plan that was measured at such a time is never chosen.
    """
    found: dict[int, Row] = {}
    larger: Row = {}
    for size in sorted(by_size, reverse=True):
        row, least = {}, float("inf")
        for length in sorted(by_size[size], reverse=True):
            least = min(least, by_size[size][length], larger.get(length, float("inf")))
            row[length] = least
        found[size] = larger = dict(sorted(row.items()))
    return found


def measure_catch_up(executor: "Executor") -> dict[int, float]:
    """Times the drafter as it makes up for steps that drafted nothing.

    To be called when `measure_pass_times` has run.

    Returns:
        Seconds for each token of such a step, by context; 0 where the drafter runs in
        every step.
    """
    seconds: dict[int, float] = {}
    for context, by_size in executor.vllm_config.speculative_config.pass_times.items():
        if context > CONTEXT and current_platform.is_cpu():
            continue  # of one request, where each row takes more
        args = (max(by_size), context)
        seconds[context] = max(executor.collective_rpc(catch_up_seconds, args=args))
    executor.collective_rpc(leave_no_trace)
    told = ", ".join(f"{at}: {1e3 * each:.3f}" for at, each in seconds.items())
    logger.debug("Milliseconds to catch up on a token by context: %s.", told)
    return seconds


def measure_trimmed_times(executor: "Executor") -> dict[int, Row]:
    """Times steps that draft the longest chain and verify a part of it.

    To be called when `measure_pass_times` has run. What it makes ready is compiled and
    loaded then, too.

    Returns:
        Seconds by number of requests and by drafts that are verified of each; empty
        where no step is trimmed, since workers cannot or so many requests could not be
        measured: then the scheduler gives no budgets.
    """
    spec = executor.vllm_config.speculative_config
    if trims(spec) and not all(executor.collective_rpc(_is_trimming)):
        # The workers said why, and that every step verifies all its drafts.
        spec.enable_adaptive_verification = spec.is_trimmed_by_default = False
    if not trims(spec):
        return {}
    depth, started = spec.drafter.num_speculative_tokens, time.perf_counter()
    sizes = sorted(n for n in spec.pass_times[CONTEXT] if n >= MIN_REQUESTS)
    sizes = [n for n in sizes if n & (n - 1) == 0 or n == sizes[-1]]
    # Those of chains that "auto" has, so that the two compare; and between the short
    # ones, where a step turns from reading weights to multiplying by them.
    lengths = {length for length in candidate_lengths(depth) if length}
    lengths |= {length + 0.5 for length in range(1, min(depth, SHORT))}

    def measure(size: int, num_verified: float) -> float:
        args = (size, depth, CONTEXT, num_verified)
        return max(executor.collective_rpc(seconds_per_step, args=args))

    times = {n: {k: measure(n, k) for k in sorted(lengths)} for n in sizes}
    executor.collective_rpc(leave_no_trace)
    logger.info(
        "Measured steps that verify a part of their drafts for %s requests in %.1f "
        "seconds.",
        "/".join(map(str, sizes)) or "no",
        time.perf_counter() - started,
    )
    _log_table("Milliseconds of a step by requests and drafts verified", times)
    return times


def _is_trimming(worker: "WorkerBase") -> bool:
    """Workers know their attention, and may have given it up."""
    return worker.model_runner.trimming is not None


def _most_requests(config: "VllmConfig", seconds: float) -> int:
    """Requests of the largest step to measure.

    Args:
        seconds: that the steps of one request took, on a CPU.
    """
    scheduler = config.scheduler_config
    most = min(scheduler.max_num_seqs, scheduler.max_num_batched_tokens, MAX_REQUESTS)
    if not current_platform.is_cpu():
        return most
    if config.parallel_config.data_parallel_size > 1:
        return min(most, IN_STEP_CPU_REQUESTS)
    return min(most, max(2, int(CPU_LARGEST_SECONDS / max(seconds, 1e-3))))


def _log_measured(times: PassTimes, num_lengths: int, seconds: float) -> None:
    sizes = ", ".join(
        f"{'/'.join(map(str, sorted(by_size)))} requests of {context} tokens"
        for context, by_size in times.items()
    )
    logger.info(
        "Measured the steps of %d draft lengths for %s in %.1f seconds.",
        num_lengths,
        sizes,
        seconds,
    )
    for context, by_size in times.items():
        what = f"Milliseconds of a step at {context} tokens by requests and drafts"
        _log_table(what, by_size)


def _log_table(what: str, by_size: dict[int, Row]) -> None:
    rows = (
        f"{size}: " + ", ".join(f"{each} {1e3 * row[each]:.2f}" for each in row)
        for size, row in sorted(by_size.items())
    )
    logger.debug("%s: %s.", what, "; ".join(rows))


def long_contexts(config: "VllmConfig", largest: int) -> Iterator[tuple[int, int]]:
    """Contexts and numbers of requests that the KV cache holds, the telling ones first.

    Args:
        largest: the most requests that were measured.
    """
    cache = config.cache_config
    held = (cache.num_gpu_blocks or 0) * cache.block_size
    if config.parallel_config.data_parallel_size > 1:
        # What another rank holds is not known here; requests may share blocks.
        largest, held = 1, float("inf")
    drafts = config.speculative_config.num_speculative_tokens
    longest = config.model_config.max_model_len - (2 + TIMED_STEPS) * (drafts + 1) - 2
    seen = [CONTEXT]
    for context in (min(context, longest) for context in LONG_CONTEXTS):
        if any(2 * max(context, other) < 3 * min(context, other) for other in seen):
            continue  # another is as long
        if context > CONTEXT:
            seen.append(context)
            fitting = [n for n in LONG_SIZES if n <= largest and n * context <= held]
            yield from ((context, n) for n in fitting)


def sizes_to_measure(largest: int) -> list[int]:
    """Numbers of requests, in the order of what they tell.

    The ends, the powers of two between them from the middle out, then what lies
    halfway between those, largest first: times bend most in large batches.
    """
    powers = [
        1 << bits for bits in range(1, largest.bit_length()) if 1 << bits < largest
    ]
    middle = len(powers) // 2
    outwards = sorted(range(len(powers)), key=lambda at: abs(at - middle))
    halfway = [size * 3 // 2 for size in reversed(powers) if size * 3 // 2 < largest]
    return list(dict.fromkeys([1, largest, *(powers[at] for at in outwards), *halfway]))


def seconds_per_step(
    worker: "WorkerBase",
    num_reqs: int,
    num_drafts: int,
    context: int,
    num_verified: float | None = None,
) -> float:
    """Runs decode steps that verify and draft, back to back; seconds of one of them.

    To be run on every worker at once, between warm-up and the first request.

    Args:
        num_verified: of each request's drafts, on average, those that are verified,
            less than all; None: all.
    """
    runner = worker.model_runner
    requests = _Requests(runner, num_reqs, num_drafts, context)
    if num_verified is not None:
        drafts = (requests.query_len - 1) * num_reqs
        requests.verify_budget = min(round(num_reqs * num_verified), drafts - 1)

    def next_step() -> None:
        _run(worker, requests.next_step())

    # On a device, which is busy with the step before: as while serving, the host
    # prepares a step while another one runs. On a CPU each by itself, and the fastest
    # counts: something else may have had the core in the others.
    at_once = 1 if runner.device.type == "cpu" else requests.timed_steps
    runner.kv_connector.set_disabled(True)
    try:
        _run(worker, requests.first_step())
        next_step()
        runs = range(requests.timed_steps // at_once)
        seconds = min(_timed(worker, next_step, at_once) for _ in runs) / at_once
        worker.execute_model(requests.finish())
    finally:
        runner.kv_connector.set_disabled(False)
    return seconds


def catch_up_seconds(worker: "WorkerBase", num_reqs: int, context: int) -> float:
    """Runs steps without drafts, and what the drafter left out of them in one pass.

    To be run on every worker at once, as `seconds_per_step`.

    Returns:
        Seconds of the pass for each token; 0 where the drafter runs in every step.
    """
    # Here: the engine's own process, which sends the function, has no runner.
    from vllm.v1.worker.gpu.spec_decode.unified.backlog import backlog_of, catch_up_now

    runner = worker.model_runner
    if backlog_of(runner) is None:
        return 0.0
    is_cpu = runner.device.type == "cpu"
    steps = max(CATCH_UP_ROWS // num_reqs, TIMED_STEPS)
    steps = min(steps, CPU_CATCH_UP_STEPS if is_cpu else CATCH_UP_STEPS)
    requests = _Requests(runner, num_reqs, 0, context, 2 * steps)
    if not (steps := requests.timed_steps // 2):
        return 0.0  # a context of a few tokens has no room
    runner.kv_connector.set_disabled(True)
    try:
        _run(worker, requests.first_step())
        _run(worker, requests.next_step())
        catch_up_now(runner)  # compiles what it has to
        seconds = []
        for _ in range(2):
            for _ in range(steps):
                _run(worker, requests.next_step())
            seconds.append(_timed(worker, lambda: catch_up_now(runner)))
        worker.execute_model(requests.finish())
    finally:
        runner.kv_connector.set_disabled(False)
    return min(seconds) / (steps * num_reqs)


def _timed(worker: "WorkerBase", run: Callable[[], None], count: int = 1) -> float:
    """Seconds of so many runs, back to back."""
    # Here: the engine's own process, which sends the function, has no runner.
    from vllm.v1.worker.gpu.spec_decode.step_clock import make_mark

    begin, end = (make_mark(worker.model_runner.device) for _ in range(2))
    begin.record()
    for _ in range(count):
        run()
    end.record()
    worker.synchronize_device()
    return begin.elapsed_time(end) / 1e3


def leave_no_trace(worker: "WorkerBase") -> None:
    """What is sampled and verified must not depend on what was measured; nor is the
    memory kept that the largest steps took. As warm-up leaves it."""
    runner = worker.model_runner
    config = runner.vllm_config
    set_random_seed(
        config.model_config.seed, config.parallel_config.data_parallel_index
    )
    if runner.trimming is not None:
        runner.trimming.forget()
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()


def _run(worker: "WorkerBase", step: SchedulerOutput) -> None:
    worker.execute_model(step)
    worker.sample_tokens(None)


class _Requests:
    """Requests in the middle of their output, and the steps that go on with them."""

    def __init__(
        self,
        runner: "GPUModelRunner",
        num_reqs: int,
        num_drafts: int,
        context: int,
        timed_steps: int = TIMED_STEPS,
    ):
        self.runner = runner
        self.num_drafts = num_drafts
        self.verify_budget: int | None = None
        # Few tokens a step cut the drafts that are verified, as scheduling would.
        budget = runner.vllm_config.scheduler_config.max_num_batched_tokens
        self.query_len = min(num_drafts, budget // num_reqs - 1) + 1
        room = runner.max_model_len - 2
        self.timed_steps = max(1, min(timed_steps, room // self.query_len - 1))
        num_new = (1 + self.timed_steps) * self.query_len
        self.num_computed = max(1, min(context, room - num_new))
        self.num_tokens = self.num_computed + 1 + num_new
        self.req_ids = [f"_pass_times_{i}" for i in range(num_reqs)]

    def first_step(self) -> SchedulerOutput:
        """The last prompt token of every request; the rest counts as cached."""
        step = self._step(1)
        step.scheduled_new_reqs = [self._request(i) for i in range(len(self.req_ids))]
        self.num_computed += 1
        return step

    def next_step(self) -> SchedulerOutput:
        """Verifies the drafts of the step before."""
        step, count = self._step(self.query_len), len(self.req_ids)
        cached = CachedRequestData.make_empty()
        cached.req_ids = self.req_ids
        cached.num_computed_tokens = [self.num_computed] * count
        cached.num_output_tokens = [1] * count
        cached.new_block_ids = [None] * count
        step.scheduled_cached_reqs = cached
        if self.query_len > 1:
            drafts = [-1] * (self.query_len - 1)  # the workers have them
            step.scheduled_spec_decode_tokens = dict.fromkeys(self.req_ids, drafts)
            step.verify_budget = self.verify_budget
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
        """Blocks for all steps; shared between requests where there are too few."""
        # Here: the engine's own process, which sends the function, has no runner.
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
