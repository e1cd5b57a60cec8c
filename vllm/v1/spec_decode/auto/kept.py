# SPDX-License-Identifier: Apache-2.0
"""Keeps the step times of a start for later ones, beside torch.compile's cache."""

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from pydantic import TypeAdapter

from vllm import envs
from vllm.config.drafter import StepTimes
from vllm.config.drafter.length import chosen_lengths
from vllm.logger import init_logger
from vllm.v1.worker.startup_plan import compute_plan_fingerprint

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.worker.worker_base import WorkerBase

logger = init_logger(__name__)

TIMES = TypeAdapter(StepTimes)
DRIVER = Path("/proc/driver/nvidia/version")


def fingerprint(worker: "WorkerBase") -> tuple[Any, ...]:
    """What a worker's machine, versions and models are. The engine's own process may
    have no device."""
    config = worker.vllm_config
    return (
        # vLLM's key for a memory profile: versions, models, device, what is compiled.
        compute_plan_fingerprint(config, 0, config.parallel_config.world_size),
        DRIVER.read_text() if DRIVER.exists() else None,
        (os.cpu_count(), torch.backends.cpu.get_cpu_capability()),
    )


def file_of(
    config: "VllmConfig", is_trimmed: bool, workers: Sequence[tuple[Any, ...]]
) -> Path | None:
    """The file of an engine's step times, named by a hash of what decides them: models,
    device, versions, settings.

    None with `VLLM_DISABLE_COMPILE_CACHE`, and for data-parallel ranks, which measure
    in lockstep: they might not all find a file.

    Args:
        is_trimmed: whether some steps verify only part of their drafts.
        workers: the fingerprint of each.
    """
    spec, compilation = config.speculative_config, config.compilation_config
    parallel = config.parallel_config
    if envs.VLLM_DISABLE_COMPILE_CACHE or parallel.data_parallel_size > 1:
        return None
    factors = (
        workers,
        sorted(envs.compile_factors().items()),
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


def load(path: Path | None) -> StepTimes | None:
    """The times of an earlier start, if there are any."""
    if path is None:
        return None
    try:
        times = TIMES.validate_json(path.read_bytes())
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
