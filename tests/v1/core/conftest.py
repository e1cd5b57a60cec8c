# SPDX-License-Identifier: Apache-2.0
"""Schedulers of an engine with a bundled drafter, without a worker."""

from collections.abc import Callable

import pytest
import torch

from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
)
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

BLOCK_SIZE, K = 16, 3


@pytest.fixture
def make_scheduler(models) -> Callable[..., Scheduler]:
    """Makes a scheduler with one waiting request.

    `sampling` are parameters of the request, other keyword arguments keys of the
    speculative config; `drafter` None turns speculation off.
    """

    def make(drafter="pard", log_stats=True, sampling=None, **spec) -> Scheduler:
        spec |= {"model": str(models / str(drafter)), "num_speculative_tokens": K}
        config = EngineArgs(
            model=str(models / "target"),
            dtype="float32",
            max_model_len=128,
            max_num_seqs=8,
            async_scheduling=False,
            per_request_spec_decode_metrics="detailed" if drafter else "none",
            speculative_config=spec if drafter else None,
        ).create_engine_config()
        config.cache_config.num_gpu_blocks = 64
        layer = FullAttentionSpec(
            block_size=BLOCK_SIZE, num_kv_heads=1, head_size=8, dtype=torch.float32
        )
        groups = [KVCacheGroupSpec(["layer"], layer)]
        scheduler = Scheduler(
            config,
            KVCacheConfig(num_blocks=64, kv_cache_tensors=[], kv_cache_groups=groups),
            StructuredOutputManager(config),
            block_size=BLOCK_SIZE,
            log_stats=log_stats,
        )
        asked = {"max_tokens": 64, "ignore_eos": True} | (sampling or {})
        asked = SamplingParams(**asked)
        scheduler.add_request(Request("a", [1, 2, 3], asked, None))
        return scheduler

    return make
