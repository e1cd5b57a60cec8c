# SPDX-License-Identifier: Apache-2.0
"""Which targets can verify trees; for others an engine drafts chains."""

from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torch.nn as nn

from vllm.config import CUDAGraphMode, ParallelConfig
from vllm.config.drafter import DrafterConfig
from vllm.config.drafter.length import AutoSchedule
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import AttentionType
from vllm.v1.spec_decode.draft_trees import agree_on_trees
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu.model_states.default import DefaultModelState
from vllm.v1.worker.gpu.spec_decode.unified.tree.attend import (
    block_sizes,
    why_layer_cannot,
)
from vllm.v1.worker.gpu.spec_decode.unified.tree.step import (
    LONG_PROMPT,
    TreeStep,
    why_no_trees,
)


def layer(backend: str = "FLASH_ATTN", **given) -> SimpleNamespace:
    impl = {
        "sliding_window": (-1, -1),
        "sinks": None,
        "alibi_slopes": None,
        "logits_soft_cap": 0,
        "kv_cache_dtype": "auto",
        "attn_type": AttentionType.DECODER,
        "vllm_flash_attn_version": 3,
    }
    name = SimpleNamespace(get_name=lambda: backend)
    return SimpleNamespace(attn_backend=name, impl=SimpleNamespace(**impl | given))


@pytest.mark.parametrize(
    "given, reason",
    [
        ({"kv_cache_dtype": "fp8"}, None),
        ({"backend": "TRITON_ATTN", "kv_cache_dtype": "fp8_e4m3"}, None),
        ({"backend": "FLASHINFER"}, "attention by FLASHINFER"),
        ({"alibi_slopes": object()}, "ALiBi"),
        ({"chunk_lookback": 1}, "chunked attention"),
        (
            {"kv_cache_dtype": "int8_per_token_head"},
            "a KV cache in int8_per_token_head",
        ),
        ({"attn_type": AttentionType.ENCODER}, "encoder attention"),
        ({"vllm_flash_attn_version": 4}, "FlashAttention 4"),
    ],
)
def test_why_layer_cannot(given: dict, reason: str | None):
    assert why_layer_cannot(layer(**given)) == reason


class ChunkedAttention(Attention):
    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.__dict__ |= vars(layer())


def test_attention_of_another_kind():
    assert why_layer_cannot(ChunkedAttention()) == "attention by ChunkedAttention"


def runner(masks=False, experts=False, fast_prefill=False) -> SimpleNamespace:
    config = SimpleNamespace(
        parallel_config=ParallelConfig(),
        model_config=SimpleNamespace(return_sampling_mask=masks, has_inner_state=False),
        aux_output_config=SimpleNamespace(enabled=experts),
        compilation_config=SimpleNamespace(cudagraph_mode=CUDAGraphMode.NONE),
        kv_transfer_config=None,
        cache_config=SimpleNamespace(kv_sharing_fast_prefill=fast_prefill),
    )
    state = object.__new__(DefaultModelState)
    return SimpleNamespace(vllm_config=config, model_state=state)


@pytest.mark.parametrize(
    "given, reason",
    [
        ({}, None),
        ({"masks": True}, "returned sampling masks"),
        ({"experts": True}, "returned routed experts"),
        ({"fast_prefill": True}, "kv_sharing_fast_prefill"),
    ],
)
def test_outputs_that_are_taken_by_row_number(given: dict, reason: str | None):
    """In a tree, rows that follow each other are not of tokens that do."""
    assert why_no_trees(runner(**given), {}) == reason


def agreed(verifies: list[bool], schedule):
    """The schedule of an engine whose workers can verify trees, or cannot."""
    spec = SimpleNamespace(
        drafter=DrafterConfig("draft_model", 7, num_nodes=31),
        num_speculative_tokens_per_batch_size=schedule,
    )
    scheduler = SimpleNamespace(max_num_seqs=64)
    config = SimpleNamespace(speculative_config=spec, scheduler_config=scheduler)
    trees = [object() if found else None for found in verifies]
    workers = [Mock(**{"model_runner.draft_tree": tree}) for tree in trees]
    every = Mock(speculative_config=spec, vllm_config=config)
    every.collective_rpc = lambda method: list(map(method, workers))
    agree_on_trees(every)
    return spec.num_speculative_tokens_per_batch_size


@pytest.mark.parametrize(
    "schedule, chains",
    [(None, [(1, 64, 7)]), ([(1, 2, 31), (3, 64, 5)], [(1, 2, 7), (3, 64, 5)])],
)
def test_engine_drafts_chains_if_a_worker_does_not_support_trees(schedule, chains):
    assert agreed([True, True], schedule) == schedule
    assert agreed([True, False], schedule) == chains


def test_auto_chooses_among_chains_without_tree_support():
    schedule = agreed([False], AutoSchedule([0, 3, 7, 15, 31]))
    assert schedule == "auto" and max(schedule.lengths) == 7


@pytest.mark.parametrize(
    "prompt, with_prompt", [(LONG_PROMPT, 3), (LONG_PROMPT + 1, 2)]
)
def test_only_long_prompts_use_separate_attention(prompt: int, with_prompt: int):
    """Without a CUDA graph each additional call per layer costs host time."""
    rows = np.array([32, 9, prompt])
    batch = SimpleNamespace(
        num_reqs=3,
        num_draft_tokens_per_req=np.array([31, 8, 0]),
        num_scheduled_tokens=rows,
        query_start_loc_np=np.array([0, *rows.cumsum()]),
    )
    step = SimpleNamespace(rows=None, long_prompt=LONG_PROMPT)
    tree = TreeStep._of_step(step, batch)
    assert tree.num_reqs == with_prompt
    assert tree.num_tokens == rows[:with_prompt].sum()
    assert tree.covers_batch == (with_prompt == 3)
    assert tree.max_query_len == rows[:with_prompt].max()
    # Regression: a prompt's length chose sizes that were compiled while serving.
    assert block_sizes(tree, True) == block_sizes(replace(tree, max_query_len=32), True)


def test_requests_of_a_step_without_drafts_are_looked_at():
    """Regression: the trees that it grows were those of the step before, so that a
    request with penalties got one that it cannot accept."""
    logits = torch.zeros(2, 8)
    runner = Mock(spec=GPUModelRunner, batch_sharder=None, draft_tree=Mock())
    runner.model, runner.sampler = Mock(), Mock()
    runner.model.compute_logits.return_value = logits
    batch = SimpleNamespace(num_reqs=2, num_draft_tokens=0, logits_indices=[0, 1])
    GPUModelRunner.sample(runner, logits, batch, None)
    runner.draft_tree.constrain.assert_called_once_with(batch, None)
