# SPDX-License-Identifier: Apache-2.0
"""Attention metadata that is updated between draft passes, on a CPU."""

from types import SimpleNamespace

import pytest
import torch

from vllm.platforms import current_platform

if not current_platform.is_cpu():
    pytest.skip("needs the CPU attention backend", allow_module_level=True)

from vllm import _custom_ops as ops
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionMetadataBuilder,
    _get_attn_isa,
)
from vllm.v1.worker.gpu.spec_decode.cpu_schedule import update_schedule

BLOCK, HEADS, KV_HEADS, SIZE, DTYPE = 32, 4, 2, 64, torch.float32


@pytest.fixture
def builder() -> SimpleNamespace:
    return SimpleNamespace(
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=SIZE,
        dtype=DTYPE,
        window_size=-1,
        isa=_get_attn_isa(DTYPE, BLOCK, SIZE),
        kv_cache_dtype="auto",
        is_cross_attention=False,
        is_encoder_only_attention=False,
    )


def attend(metadata, query, kv_cache) -> torch.Tensor:
    blocks = len(kv_cache)
    caches = kv_cache.view(blocks, KV_HEADS, 2 * SIZE, -1).chunk(2, dim=2)
    out = torch.empty_like(query)
    ops.cpu_attention_with_kv_cache(
        query=query,
        key_cache=caches[0],
        value_cache=caches[1],
        output=out,
        query_start_loc=metadata.query_start_loc,
        seq_lens=metadata.seq_lens,
        scale=0.3,
        causal=True,
        alibi_slopes=None,
        sliding_window=-1,
        block_table=metadata.block_table,
        softcap=0.0,
        scheduler_metadata=metadata.scheduler_metadata,
        s_aux=None,
    )
    return out


@pytest.mark.parametrize("later", [[65, 2, 300], [5000, 700, 33]])
def test_metadata_follows_sequence_lengths(builder, later):
    """As in later passes: the lengths change where the metadata refers to them."""
    torch.manual_seed(0)
    num_reqs = len(later)
    kv_cache = torch.randn(num_reqs * 160, KV_HEADS, BLOCK, 2 * SIZE)
    query = torch.randn(num_reqs, HEADS, SIZE)
    seq_lens = torch.tensor([64, 1, 299], dtype=torch.int32)
    metadata = SimpleNamespace(
        query_start_loc=torch.arange(num_reqs + 1, dtype=torch.int32),
        seq_lens=seq_lens,
        block_table=torch.randperm(len(kv_cache)).view(num_reqs, -1).int(),
        causal=True,
        dynamic_causal=None,
        scheduler_metadata=None,
    )
    update_schedule(builder, metadata)
    before = attend(metadata, query, kv_cache)
    seq_lens.copy_(torch.tensor(later))
    update_schedule(builder, metadata)
    found = attend(metadata, query, kv_cache)

    given = {
        "num_reqs": num_reqs,
        "num_actual_tokens": num_reqs,
        "max_query_len": 1,
        "max_seq_len": max(later),
        "block_table_tensor": metadata.block_table,
        "slot_mapping": None,
    }
    anew = CPUAttentionMetadataBuilder.build(
        builder, 0, SimpleNamespace(**vars(metadata), **given)
    )
    torch.testing.assert_close(found, attend(anew, query, kv_cache))
    assert not torch.isclose(found, before).all()
