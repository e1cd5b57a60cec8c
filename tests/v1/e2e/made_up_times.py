# SPDX-License-Identifier: Apache-2.0
"""Step times with which "auto" chooses, and trims large batches, on any machine."""

import os

from vllm.config import VllmConfig
from vllm.config.drafter import StepTimes
from vllm.config.drafter.length import MIN_REQUESTS, candidate_lengths, chosen_lengths
from vllm.v1.spec_decode.auto import measure
from vllm.v1.spec_decode.auto.chooser import Chooser
from vllm.v1.spec_decode.auto.times import Rows

SIZES = (1, 4, 6, 8, 16)
KNEE = 24


def seconds(rows: float) -> float:
    """Rows cost little up to `KNEE`, and much beyond."""
    return 1.0 + 0.03 * rows + 0.2 * max(0.0, rows - KNEE)


def made_up(config: VllmConfig, run: measure.Measure, is_trimmed: bool) -> StepTimes:
    spec = config.speculative_config
    depth = spec.drafter.num_speculative_tokens
    # Real measurements, whose results are not used.
    assert run(SIZES[0], spec.num_speculative_tokens, 1) > 0
    assert not is_trimmed or run(MIN_REQUESTS, depth, 1, 1) > 0

    def rows(lengths: list[int], least: int = 1) -> Rows:
        sizes = [n for n in SIZES if n >= least]
        return {n: {k: seconds(n * (k + 1)) for k in lengths} for n in sizes}

    parts = [length for length in candidate_lengths(depth) if length]
    trimmed = rows(parts, MIN_REQUESTS) if is_trimmed else None
    return StepTimes({1: rows(chosen_lengths(spec))}, trimmed)


def make_up_times() -> None:
    """Replaces the measurements of engines that start from now on."""
    measure.measure_all = made_up
    os.environ["VLLM_DISABLE_COMPILE_CACHE"] = "1"  # keep none
    # No corrections by times of served steps, and so no steps only to be timed.
    Chooser.observe_seconds = lambda *_: None
