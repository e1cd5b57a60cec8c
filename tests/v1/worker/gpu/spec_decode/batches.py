# SPDX-License-Identifier: Apache-2.0
"""Small verified batches, and block tables for them."""

from types import SimpleNamespace
from typing import Any

import torch

from vllm.platforms import current_platform
from vllm.v1.worker.gpu.block_table import BlockTables
from vllm.v1.worker.gpu.spec_decode.unified.input_kernel import VerifiedBatch
from vllm.v1.worker.gpu.spec_decode.unified.inputs import DraftInputs, DraftLimits
from vllm.v1.worker.gpu.spec_decode.unified.layout import DraftLayout, DraftPlan

DEVICE = torch.device(current_platform.device_type)
SAMPLED, PREFILL = 55, 66  # the next tokens


def int32(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def int64(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64, device=DEVICE)


def told(buffers: DraftInputs, tables: BlockTables, limits: DraftLimits) -> DraftInputs:
    """Buffers that know what an engine tells them before its first step."""
    buffers.limits = limits
    buffers.tables = SimpleNamespace(target=tables, update_for_pass=lambda *_: None)
    return buffers


def plan_of(layout: DraftLayout, num_drafts: int | None = None) -> DraftPlan:
    """Of a step without graphs; by default it drafts K tokens."""
    k = layout.num_speculative_tokens if num_drafts is None else num_drafts
    return DraftPlan(k, layout, k, k)


def verified_batch(
    query_lens: list[int],  # of each request; 0 for padding
    starts: list[int],  # positions of their first tokens
    max_num_reqs: int | None = None,
    **fields: torch.Tensor,
) -> VerifiedBatch:
    """A batch of requests that have each sampled a token; none were rejected.

    Token ids count from 100, request states from 0; `fields` differ from this.
    """
    n = len(query_lens)
    most = max_num_reqs or n
    spans = zip(starts, query_lens, strict=True)
    positions = [at for start, count in spans for at in range(start, start + count)]
    usual = VerifiedBatch(
        input_ids=int32(range(100, 100 + len(positions))),
        positions=int64(positions),
        query_start_loc=int32([0, *query_lens]).cumsum(0, dtype=torch.int32),
        idx_mapping=int64(range(n)),
        num_sampled=int32([1] * n),
        num_rejected=int32([0] * n),
        last_sampled=int64([[SAMPLED]] * most),
        next_prefill_tokens=int32([PREFILL] * most),
        temperature=torch.zeros(most, device=DEVICE),
        seeds=int64([0] * most),
    )
    return usual._replace(**fields)


def block_tables(blocks: list[int], max_num_reqs: int = 1) -> BlockTables:
    """Block tables in which each request has these blocks of 16 tokens."""
    tables = BlockTables([16], max_num_reqs, 4096, [len(blocks)], DEVICE)
    tables.block_tables[0].gpu.copy_(int32(blocks).expand(max_num_reqs, -1))
    tables.num_blocks.np[0] = len(blocks)
    tables.num_blocks.copy_to_uva()
    return tables
