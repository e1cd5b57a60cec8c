# SPDX-License-Identifier: Apache-2.0
"""Measures step times by context, number of requests and draft length.

The steps run after warm-up. They are the engine's own, from the input batch to the
drafts: target, logits, rejection sampling, drafter, and the host's work. Their requests
are dummies, and so is their cached context.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from math import sqrt
from typing import TYPE_CHECKING

import numpy as np
import torch

from vllm.config.drafter.drafter import StepTimes
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
from vllm.v1.core.sched.output import (
    CachedRequestData,
    NewRequestData,
    SchedulerOutput,
)

from .step_times import PassTimes, Row, TrimmedTimes

if TYPE_CHECKING:
    from vllm.config import SpeculativeConfig, VllmConfig
    from vllm.v1.executor.abstract import Executor
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner
    from vllm.v1.worker.worker_base import WorkerBase

logger = init_logger(__name__)

MAX_REQUESTS = 256  # larger batches are extrapolated
CONTEXT = 256  # tokens of each request before the step
# Longer contexts, the most informative ones first, and numbers of requests there.
LONG_CONTEXTS = (16384, 65536, 4096)
LONG_SIZES = (1, 8, 64)
TIMED_STEPS = 4
# Other load on a CPU differs more between plans, which are seconds apart, than between
# the steps of one: more steps are no more accurate.
CPU_TIMED_STEPS = 2
# Up to this many verified drafts per request, trimmed steps are also timed at halves.
SHORT = 4
# Time after which no further measurement begins. A GPU needs about two seconds for one
# context and three for the others; the rest is for a host that is busy with other
# engines that start.
BUDGET_SECONDS = 10.0
CPU_BUDGET_SECONDS = 1.0
# Share by which a step may take longer than a larger one on a GPU, as matrix products
# of some sizes do; more is taken for other load.
REAL_FALL = 0.1
# Most time of the largest batch's steps on a CPU, if requests ran one after the other.
CPU_LARGEST_SECONDS = 6.0
IN_STEP_CPU_REQUESTS = 4
# Share by which a chain's step on a CPU usually takes more or less than a line through
# the times of all chains, and fewest chains to draw one.
OFF_LINE, LEAST_ON_LINE = 0.05, 4


def measure_steps(executor: "Executor") -> None:
    """Times all plans of "auto", and stores the times in the speculative config for the
    scheduler."""
    passes = measure_pass_times(executor)
    trimmed = measure_trimmed_times(executor, passes)
    executor.vllm_config.speculative_config.step_times = StepTimes(passes, trimmed)


def measure_pass_times(executor: "Executor") -> PassTimes:
    """Times steps on all workers; the slowest worker counts.

    At a short context one request and the largest batch are always measured, batches
    between them while the time budget lasts, and then longer contexts. On a CPU, where
    the time of a step is proportional to its requests, `CPU_LARGEST_SECONDS` limits the
    largest batch.
    """
    config = executor.vllm_config
    lengths = chosen_lengths(config.speculative_config)
    depth = config.speculative_config.drafter.num_speculative_tokens
    chains = [length for length in lengths if length <= depth]
    trees = [length for length in lengths if length > depth]
    more = f", and trees of {_listed(trees)}" if trees else ""
    logger.info("Timing steps that draft %s tokens%s.", _listed(chains), more)

    def measure(context: int, size: int, wanted: list[int] = lengths) -> Row:
        def seconds_of(length: int) -> float:
            args = (size, length, context)
            return max(executor.collective_rpc(seconds_per_step, args=args))

        # Those of too many rows to pay have no CUDA graph: estimated, not measured.
        few = [k for k in wanted if k <= depth or size * (k + 1) <= MAX_TREE_ROWS]
        if is_cpu:
            row = _beside_shortest(few, depth, seconds_of)
        else:
            row = {length: seconds_of(length) for length in few}
        more = {k: row[depth] * (k + 1) / (depth + 1) for k in wanted if k not in few}
        return row | more

    is_cpu = current_platform.is_cpu()
    started = time.perf_counter()
    times: PassTimes = {CONTEXT: {1: measure(CONTEXT, 1)}}
    budget, seconds = BUDGET_SECONDS, 0.0
    if is_cpu:
        # Not the time that it took: the first steps compile.
        budget, row = CPU_BUDGET_SECONDS, times[CONTEXT][1].values()
        seconds = (CPU_TIMED_STEPS + 2) * (sum(row) + len(row) * min(row))
    largest = _most_requests(config, seconds)
    if config.parallel_config.data_parallel_size > 1:
        budget = float("inf")  # ranks in lockstep must all measure the same
    # The time that a longer context adds is nearly linear in the verified tokens, so a
    # few lengths suffice.
    few = {chains[0], chains[len(chains) // 2], depth, *trees[:1], lengths[-1]}
    few = sorted(few)
    steps = [(CONTEXT, size, lengths) for size in sizes_to_measure(largest)[1:]]
    steps += [(*point, few) for point in long_contexts(config, largest)]
    for number, (context, size, some) in enumerate(steps):
        if number and time.perf_counter() - started > budget:
            break
        times.setdefault(context, {})[size] = measure(context, size, some)
    executor.collective_rpc(leave_no_trace)
    times = {at: _at_most_larger(sizes, depth) for at, sizes in times.items()}
    _log_measured(times, len(lengths), time.perf_counter() - started)
    return times


def _beside_shortest(
    lengths: list[int], depth: int, seconds_of: Callable[[int], float]
) -> Row:
    """Seconds of each plan's step on a CPU, where other load comes and goes within
    seconds: by how much longer they are than the shortest plan's right before and
    after, and the least time of that.

    Args:
        depth: the longest chain; other plans are trees.
    """
    shortest, *longer = sorted(lengths)
    around, ratios = [seconds_of(shortest)], {shortest: 1.0}
    for length in longer:
        seconds = seconds_of(length)
        around.append(seconds_of(shortest))
        ratios[length] = seconds / sqrt(around[-2] * around[-1])
    chains = {length: ratios[length] for length in longer if 0 < length <= depth}
    if len(chains) >= LEAST_ON_LINE:
        # Half the variance of a difference is that of one time. A ratio is of one time
        # and the mean of two.
        variance = 1.5 * np.mean(np.diff(np.log(around)) ** 2) / 2
        ratios |= _toward_line(chains, float(variance))
    return {length: min(around) * ratio for length, ratio in ratios.items()}


def _toward_line(times: Row, variance: float) -> Row:
    """Step times of chains, nearer to a line through all of them the noisier they are:
    each draft adds a verified row, and a row or a pass of the drafter.

    Args:
        variance: of the logarithms of these times, by other load.
    """
    chains, seen = np.array(list(times)), np.array(list(times.values()))
    line = np.polyval(np.polyfit(chains, seen, deg=1, w=1 / seen), chains)
    weight = OFF_LINE**2 / (OFF_LINE**2 + variance)
    found = seen**weight * np.maximum(line, seen.min()) ** (1 - weight)
    return dict(zip(times, found.tolist(), strict=True))


def _listed(lengths: list[int]) -> str:
    return ", ".join(map(str, lengths))


def _at_most_larger(by_size: dict[int, Row], depth: int) -> dict[int, Row]:
    """Step times, lowered to those of more requests or drafts if these are shorter.

    Other processes make some steps seem longer, and none shorter. Without this a plan
    that was measured at such a moment would never be chosen, and so not corrected by
    served steps. On a GPU some numbers of rows are really slower than larger ones,
    usually by less than `REAL_FALL`. A tree may take fewer passes than a chain, so the
    two are not compared.
    """
    most = 1.0 if current_platform.is_cpu() else 1.0 + REAL_FALL
    found: dict[int, Row] = {}
    least: Row = {}  # of this or any larger number of requests, by length
    for size in sorted(by_size, reverse=True):
        row, of_longer = {}, [float("inf")] * 2
        for length in sorted(by_size[size], reverse=True):
            seconds, is_tree = by_size[size][length], length > depth
            lowest = min(seconds, of_longer[is_tree], least.get(length, seconds))
            row[length] = lowest if seconds > most * lowest else seconds
            least[length] = of_longer[is_tree] = lowest
        found[size] = dict(sorted(row.items()))
    return found


def measure_trimmed_times(
    executor: "Executor", passes: PassTimes
) -> TrimmedTimes | None:
    """Times steps that verify part of their drafts.

    This also compiles and loads the kernels of trimmed steps.

    Args:
        passes: what `measure_pass_times` returned.

    Returns:
        Seconds; None if no step is trimmed, since workers do not support it; empty if
        no batch that large was measured: the scheduler then gives no budgets.
    """
    spec = executor.vllm_config.speculative_config
    # If the workers do not trim, they have logged why.
    if not (trims(spec) and all(executor.collective_rpc(_is_trimming))):
        return None
    started = time.perf_counter()
    sizes = sorted(n for n in passes[CONTEXT] if n >= least_trimmed(spec))
    sizes = [n for n in sizes if n & (n - 1) == 0 or n == sizes[-1]]
    if not sizes:
        return {}

    def measure(size: int, num_drafts: int, num_verified: float) -> float:
        args = (size, num_drafts, CONTEXT, num_verified)
        return max(executor.collective_rpc(seconds_per_step, args=args))

    times = {
        k: {n: {m: measure(n, k, m) for m in _parts(k)} for n in sizes}
        for k in _trimmed_lengths(spec)
    }
    executor.collective_rpc(leave_no_trace)
    logger.info(
        "Measured steps that verify a part of %s drafts for %s requests in %.1f "
        "seconds.",
        " or ".join(map(str, times)),
        "/".join(map(str, sizes)),
        time.perf_counter() - started,
    )
    for k, by_size in times.items():
        what = f"Milliseconds of a step with {k} drafts by requests and drafts verified"
        _log_table(what, by_size)
    return times


def _trimmed_lengths(spec: "SpeculativeConfig") -> list[int]:
    """The longest chain, and the one about half as long that may be chosen: where
    trimming pays, the best length is often about that."""
    depth = spec.drafter.num_speculative_tokens
    chains = [length for length in chosen_lengths(spec) if 0 < length <= depth]
    half = min(chains, key=lambda length: abs(2 * length - depth))
    return sorted({half, depth})


def _parts(num_drafts: int) -> list[float]:
    """Mean numbers of verified drafts to time: lengths of the chains of "auto", and
    halves between short ones, where a step turns from memory-bound to compute-bound."""
    lengths: set[float] = {length for length in candidate_lengths(num_drafts) if length}
    lengths |= {length + 0.5 for length in range(min(num_drafts, SHORT))}
    return sorted(lengths)


def _is_trimming(worker: "WorkerBase") -> bool:
    """Whether a worker trims: it may not, depending on its attention backend."""
    return worker.model_runner.trimming is not None


def _most_requests(config: "VllmConfig", seconds: float) -> int:
    """Requests of the largest step to measure.

    Args:
        seconds: time of the steps with one request, on a CPU.
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


def _log_table(what: str, by_size: Mapping[int, Mapping[float, float]]) -> None:
    rows = (
        f"{size}: " + ", ".join(f"{each} {1e3 * row[each]:.2f}" for each in row)
        for size, row in sorted(by_size.items())
    )
    logger.debug("%s: %s.", what, "; ".join(rows))


def long_contexts(config: "VllmConfig", largest: int) -> Iterator[tuple[int, int]]:
    """Contexts and numbers of requests that fit the KV cache, informative ones first.

    Args:
        largest: the most requests that were measured.
    """
    cache = config.cache_config
    held = (cache.num_gpu_blocks or 0) * cache.block_size
    if config.parallel_config.data_parallel_size > 1:
        # Cache sizes of other ranks are not known here; requests may share blocks.
        largest, held = 1, float("inf")
    drafts = config.speculative_config.num_speculative_tokens
    longest = config.model_config.max_model_len - (2 + TIMED_STEPS) * (drafts + 1) - 2
    seen = [CONTEXT]
    for context in (min(context, longest) for context in LONG_CONTEXTS):
        if any(2 * max(context, other) < 3 * min(context, other) for other in seen):
            continue  # about as long as another
        if context > CONTEXT:
            seen.append(context)
            fitting = [n for n in LONG_SIZES if n <= largest and n * context <= held]
            yield from ((context, n) for n in fitting)


def sizes_to_measure(largest: int) -> list[int]:
    """Numbers of requests to measure, the most informative ones first.

    Both ends, the powers of two between them from the middle outwards, then the numbers
    halfway between those, largest first: the curve bends most in large batches.
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
    """Seconds of a decode step that verifies and drafts, of several run back to back.

    To be run on every worker at once, between warm-up and the first request.

    Args:
        num_verified: mean number of each request's drafts that are verified, less than
            all; None: all.
    """
    runner = worker.model_runner
    is_cpu = runner.device.type == "cpu"
    steps = CPU_TIMED_STEPS if is_cpu else TIMED_STEPS
    requests = _Requests(runner, num_reqs, num_drafts, context, steps)
    if num_verified is not None:
        drafts = (requests.query_len - 1) * num_reqs
        requests.verify_budget = min(round(num_reqs * num_verified), drafts - 1)

    def next_step() -> None:
        _run(worker, requests.next_step())

    # On a GPU all steps are timed together: as while serving, the host prepares a step
    # while the one before runs. On a CPU each is timed by itself, and the fastest
    # counts: other processes may have had the core during the others.
    at_once = 1 if is_cpu else requests.timed_steps
    runner.kv_connector.set_disabled(True)
    try:
        _run(worker, requests.first_step())
        requests.reports_chances = True  # compiles, too
        next_step()
        requests.reports_chances = False
        runs = range(requests.timed_steps // at_once)
        seconds = min(_timed(worker, next_step, at_once) for _ in runs) / at_once
        worker.execute_model(requests.finish())
    finally:
        runner.kv_connector.set_disabled(False)
    return seconds


def _timed(worker: "WorkerBase", run: Callable[[], None], count: int = 1) -> float:
    """Seconds of `count` runs back to back."""
    # Imported here: the engine's process, which sends the function, has no runner.
    from vllm.v1.worker.gpu.spec_decode.step_clock import make_mark

    begin, end = (make_mark(worker.model_runner.device) for _ in range(2))
    begin.record()
    for _ in range(count):
        run()
    end.record()
    worker.synchronize_device()
    return begin.elapsed_time(end) / 1e3


def leave_no_trace(worker: "WorkerBase") -> None:
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


def _run(worker: "WorkerBase", step: SchedulerOutput) -> None:
    worker.execute_model(step)
    worker.sample_tokens(None)


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
        self.runner = runner
        self.num_drafts = num_drafts
        self.verify_budget: int | None = None
        self.reports_chances = False
        # A small token budget limits the verified drafts, as when scheduling.
        budget = runner.vllm_config.scheduler_config.max_num_batched_tokens
        self.query_len = min(num_drafts, budget // num_reqs - 1) + 1
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
            drafts = [-1] * (self.query_len - 1)  # placeholders: the workers have them
            step.scheduled_spec_decode_tokens = dict.fromkeys(self.req_ids, drafts)
            step.verify_budget = self.verify_budget
            step.reports_chances = self.reports_chances
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
        # Imported here: the engine's process, which sends the function, has no runner.
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
