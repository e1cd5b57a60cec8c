# SPDX-License-Identifier: Apache-2.0
"""Step times with which "auto" chooses, and trims large batches, on any machine."""

import os

from vllm.config import VllmConfig
from vllm.config.drafter.length import MIN_REQUESTS, candidate_lengths, chosen_lengths
from vllm.v1.spec_decode.auto import measure
from vllm.v1.spec_decode.auto.times import Curves, Intervals, Table

SIZES = (1, 4, 6, 8, 16)
KNEE = 24


def seconds(rows: float) -> float:
    """Rows cost little up to `KNEE`, and much beyond."""
    return 1.0 + 0.03 * rows + 0.2 * max(0.0, rows - KNEE)


def all_verified(config: VllmConfig, run: measure.Measure) -> Table:
    spec = config.speculative_config
    # A real measurement, whose result is not used.
    assert run(SIZES[0], spec.num_speculative_tokens, 1) > 0
    lengths = chosen_lengths(spec)
    return {1: {n: {k: seconds(n * (k + 1)) for k in lengths} for n in SIZES}}


def part_verified(config: VllmConfig, run: measure.Measure, _: Table) -> Curves:
    spec = config.speculative_config
    depth = spec.drafter.num_speculative_tokens
    assert run(MIN_REQUESTS, depth, 1, 1) > 0
    lengths = [length for length in candidate_lengths(depth) if length]
    sizes = [n for n in SIZES if n >= MIN_REQUESTS]
    return {n: {k: seconds(n * (k + 1)) for k in lengths} for n in sizes}


def make_up_times() -> None:
    """Replaces the measurements of engines that start from now on."""
    measure.measure_pass_times = all_verified
    measure.measure_trimmed_times = part_verified
    os.environ["VLLM_DISABLE_COMPILE_CACHE"] = "1"  # keep none
    # No corrections by times of served steps, and so no steps only to be timed.
    Intervals.end = lambda *_: None
