# SPDX-License-Identifier: Apache-2.0
"""Step times with which "auto" chooses, and trims large batches, on any machine."""

from vllm.config.drafter.length import (
    MIN_REQUESTS,
    candidate_lengths,
    chosen_lengths,
    trims,
)
from vllm.v1.core.sched import trimming
from vllm.v1.core.sched.step_intervals import StepIntervals
from vllm.v1.executor.abstract import Executor
from vllm.v1.spec_decode.dynamic import pass_times
from vllm.v1.spec_decode.dynamic.step_times import PassTimes, TrimmedTimes

SIZES = (1, 4, 6, 8, 16)
KNEE = 24


def seconds(rows: float) -> float:
    """Rows cost little up to `KNEE`, and much beyond."""
    return 1.0 + 0.03 * rows + 0.2 * max(0.0, rows - KNEE)


def run_one(executor: Executor, *args: int) -> None:
    """Runs a real measurement, whose result is not used."""
    assert executor.collective_rpc(pass_times.seconds_per_step, args=args)[0] > 0


def all_verified(executor: Executor) -> PassTimes:
    spec = executor.speculative_config
    run_one(executor, SIZES[0], spec.num_speculative_tokens, 1)
    lengths = chosen_lengths(spec)
    return {1: {n: {k: seconds(n * (k + 1)) for k in lengths} for n in SIZES}}


def part_verified(executor: Executor, passes: PassTimes) -> TrimmedTimes | None:
    spec = executor.speculative_config
    if not trims(spec):
        return None
    depth = spec.drafter.num_speculative_tokens
    run_one(executor, MIN_REQUESTS, depth, 1, 1)
    lengths = [length for length in candidate_lengths(depth) if length]
    sizes = [n for n in SIZES if n >= MIN_REQUESTS]
    return {depth: {n: {k: seconds(n * (k + 1)) for k in lengths} for n in sizes}}


def make_up_times() -> None:
    """Replaces the measurements of engines that start from now on."""
    pass_times.measure_pass_times = all_verified
    pass_times.measure_trimmed_times = part_verified
    # No corrections by times of served steps, and so no steps only to be timed.
    StepIntervals.end = lambda *_: None
    trimming.UNTRIMMED_BUDGET = 0.0, 0.0
