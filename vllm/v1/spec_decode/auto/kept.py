# SPDX-License-Identifier: Apache-2.0
"""Keeps the step times of a start for later ones, beside torch.compile's cache."""

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from pydantic import TypeAdapter

from vllm import envs
from vllm.config.drafter import StepTimes
from vllm.config.drafter.length import chosen_lengths
from vllm.logger import init_logger
from vllm.v1.worker.startup_plan import compute_plan_fingerprint

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger(__name__)

TIMES = TypeAdapter(StepTimes)
DRIVER = Path("/proc/driver/nvidia/version")


def file_of(config: "VllmConfig", is_trimmed: bool) -> Path | None:
    """The file of an engine's step times, named by a hash of what decides them: models,
    device, versions, settings.

    None with `VLLM_DISABLE_COMPILE_CACHE`, and for data-parallel ranks, which measure
    in lockstep: they might not all find a file.

    Args:
        config: of an engine whose workers are ready.
        is_trimmed: whether some steps verify only part of their drafts.
    """
    spec, compilation = config.speculative_config, config.compilation_config
    parallel = config.parallel_config
    if envs.VLLM_DISABLE_COMPILE_CACHE or parallel.data_parallel_size > 1:
        return None
    factors = (
        # vLLM's key for a memory profile: versions, models, device, what is compiled.
        compute_plan_fingerprint(config, 0, parallel.world_size),
        sorted(envs.compile_factors().items()),
        DRIVER.read_text() if DRIVER.exists() else None,
        (os.cpu_count(), torch.backends.cpu.get_cpu_capability()),
        [(k, v) for k, v in vars(spec).items() if isinstance(v, str | int | float)],
        config.scheduler_config,
        (spec.attention_backend, parallel.disable_custom_all_reduce),
        (parallel.distributed_executor_backend, parallel.nnodes),
        (spec.drafter, chosen_lengths(spec), is_trimmed),
        config.model_config.max_model_len,
        compilation.cudagraph_mode,
        compilation.cudagraph_capture_sizes,
    )
    key = hashlib.sha256(repr(factors).encode()).hexdigest()[:16]
    return Path(envs.VLLM_CACHE_ROOT, "step_times", f"{key}.json")


def load(path: Path | None, lengths: Iterable[int]) -> StepTimes | None:
    """The times of an earlier start, if its file has those of all draft lengths."""
    if path is None:
        return None
    try:
        times = TIMES.validate_json(path.read_bytes())
        rows = times.passes[min(times.passes)].values()
        if any(set(row) != set(lengths) for row in rows):
            raise ValueError("other draft lengths")
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        logger.warning("Steps are timed anew: %s is not valid (%r).", path, error)
        return None
    logger.info(
        "Step times are those of an earlier start, in %s. To measure anew, delete the "
        "file, or set VLLM_DISABLE_COMPILE_CACHE=1.",
        path,
    )
    return times


def save(path: Path | None, times: StepTimes) -> None:
    if path is None:
        return
    written = path.with_suffix(f".{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        written.write_bytes(TIMES.dump_json(times))
        written.replace(path)  # at once: other engines may read it
    except OSError as error:
        logger.warning("The next start will time steps again: %s.", error)
