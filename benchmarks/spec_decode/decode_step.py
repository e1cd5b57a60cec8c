# SPDX-License-Identifier: Apache-2.0
"""A verified decode step, as tensors, and what a drafter's inputs must move of it."""

from dataclasses import dataclass

import numpy as np
import torch

from vllm.v1.worker.gpu.block_table import BlockTables
from vllm.v1.worker.gpu.spec_decode.unified.layout import DraftLayout

BLOCK_SIZE = 16  # tokens of a KV block
CONTEXT = 512  # positions before the step
MAX_MODEL_LEN = 2048
MASK_TOKEN = 7


@dataclass
class DecodeStep:
    """n requests, each with K + 1 target tokens, of which some were rejected.

    Tensors are as Runner V2 has them; T = n * (K + 1), R is the most requests.
    """

    num_reqs: int
    num_tokens: int
    query_len: int
    input_ids: torch.Tensor  # [T] int32
    positions: torch.Tensor  # [T] int64
    query_start_loc: torch.Tensor  # [n + 1] int32
    query_start_loc_np: np.ndarray  # [n + 1] int32
    seq_lens: torch.Tensor  # [n] int32
    idx_mapping: torch.Tensor  # [n] int64
    num_sampled: torch.Tensor  # [n] int32
    num_rejected: torch.Tensor  # [n] int32
    last_sampled: torch.Tensor  # [R, 1] int64
    next_prefill_tokens: torch.Tensor  # [R] int32
    temperature: torch.Tensor  # [R] float32
    seeds: torch.Tensor  # [R] int64
    tables: BlockTables
    aux: list[torch.Tensor]  # the target's hidden states, 3 x [T, H]
    combined: torch.Tensor  # [T, H], what an EAGLE-3 head makes of them

    @property
    def max_num_reqs(self) -> int:
        return self.tables.max_num_reqs

    @property
    def num_blocks(self) -> int:
        """KV blocks that requests hold, counted from 1."""
        return self.max_num_reqs * MAX_MODEL_LEN // BLOCK_SIZE


def make_step(
    num_reqs: int,
    num_drafts: int,
    hidden_size: int,
    max_num_reqs: int,
    device: torch.device,
    dtype: torch.dtype = torch.bfloat16,
) -> DecodeStep:
    query_len = num_drafts + 1
    num_tokens = num_reqs * query_len
    ends = torch.arange(num_reqs + 1, dtype=torch.int32) * query_len
    rejected = torch.randint(0, query_len, (num_reqs,), dtype=torch.int32)
    states = torch.arange(max_num_reqs)
    aux = [torch.randn(num_tokens, hidden_size, dtype=dtype) for _ in range(3)]
    cpu = {
        "input_ids": torch.randint(10, 1000, (num_tokens,), dtype=torch.int32),
        "positions": CONTEXT + torch.arange(num_tokens) % query_len,
        "query_start_loc": ends,
        "seq_lens": torch.full((num_reqs,), CONTEXT + query_len, dtype=torch.int32),
        "idx_mapping": torch.randperm(max_num_reqs)[:num_reqs],
        "num_sampled": query_len - rejected,
        "num_rejected": rejected,
        "last_sampled": states[:, None] + 10,
        "next_prefill_tokens": states.int(),
        "temperature": torch.zeros(max_num_reqs),
        "seeds": states,
    }
    return DecodeStep(
        num_reqs=num_reqs,
        num_tokens=num_tokens,
        query_len=query_len,
        query_start_loc_np=ends.numpy(),
        tables=_make_tables(max_num_reqs, num_tokens, device),
        aux=[rows.to(device) for rows in aux],
        combined=aux[0].to(device),
        **{name: tensor.to(device) for name, tensor in cpu.items()},
    )


def _make_tables(
    max_num_reqs: int, num_tokens: int, device: torch.device
) -> BlockTables:
    width = MAX_MODEL_LEN // BLOCK_SIZE
    tables = BlockTables(
        [BLOCK_SIZE], max_num_reqs, 2 * num_tokens + max_num_reqs, [width], device
    )
    ids = torch.arange(1, max_num_reqs * width + 1, dtype=torch.int32)
    for table in (tables.block_tables[0].gpu, tables.input_block_tables[0]):
        table.copy_(ids.view(max_num_reqs, width))
    tables.num_blocks.np[:] = width
    tables.num_blocks.copy_to_uva()
    return tables


def bytes_moved(
    layout: DraftLayout, num_reqs: int, query_len: int, hidden_row_bytes: int
) -> int:
    """What laying out a first pass must read and write at the least, in bytes.

    Args:
        hidden_row_bytes: all of the hidden states of one token; 0 if none are fed.
    """
    rows = num_reqs * (query_len + layout.num_extra_slots)
    samples = num_reqs * layout.parallel_width
    targets = num_reqs * query_len
    read = 4 * targets + 4 * rows  # token ids, block ids
    read += num_reqs * (8 + 8 + 3 * 4 + 8)  # positions, states, counts, next token
    written = rows * (4 + 8 + 8)  # token ids, positions, KV slots
    written += samples * 3 * 8 + num_reqs * (4 + 4)  # sampled slots, bounds, lengths
    hidden = (targets + rows) * hidden_row_bytes if hidden_row_bytes else 0
    return read + written + hidden
