# SPDX-License-Identifier: Apache-2.0
"""Attention metadata of draft passes in a row, on a CPU."""

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from vllm import _custom_ops as ops
from vllm import envs

if TYPE_CHECKING:
    from vllm.v1.attention.backends.cpu_attn import (
        CPUAttentionMetadata,
        CPUAttentionMetadataBuilder,
    )
    from vllm.v1.worker.utils import AttentionGroup


def update_schedule(
    builder: "CPUAttentionMetadataBuilder", metadata: "CPUAttentionMetadata"
) -> None:
    """Divides attention's work anew, for the sequence lengths that `metadata` refers to
    by now. All else of the metadata is the same in later draft passes of a step."""
    metadata.scheduler_metadata = ops.cpu_attn_get_scheduler_metadata(
        num_reqs=len(metadata.seq_lens),
        num_heads=builder.num_heads,
        num_kv_heads=builder.num_kv_heads,
        head_dim=builder.head_dim,
        seq_lens=metadata.seq_lens,
        dtype=builder.dtype,
        query_start_loc=metadata.query_start_loc,
        causal=metadata.causal,
        sliding_window_size=builder.window_size,
        isa=builder.isa,
        enable_kv_split=envs.VLLM_CPU_ATTN_SPLIT_KV,
        dynamic_causal=metadata.dynamic_causal,
        kv_cache_dtype=builder.kv_cache_dtype,
    )


def of_later_passes(
    first: dict[str, "CPUAttentionMetadata"],
    groups: Iterable["AttentionGroup"],
    slots: torch.Tensor,
    width: int,
) -> dict[str, "CPUAttentionMetadata"]:
    """The metadata of later passes by layer, from that of the first pass of the same
    requests. Building it anew takes 0.1 ms.

    It lacks how attention divides its work: see `update_schedule`.

    Args:
        first: of the first pass, by layer.
        groups: layers that share metadata.
        slots: [KV cache groups, rows] slots of the rows of a later pass.
        width: rows of each request.
    """
    found = {}
    for group in groups:
        own = slots[group.kv_cache_group_id]
        rows = {"num_actual_tokens": len(own), "slot_mapping": own}
        later = replace(first[group.layer_names[0]], max_query_len=width, **rows)
        found |= dict.fromkeys(group.layer_names, later)
    return found
