# SPDX-License-Identifier: Apache-2.0
"""The input kernel's arguments; their fields are declared only here.

The Triton kernel takes these tuples as they are, and `buffers.py` allocates the draft
batch from its declaration.

R is the maximum number of requests, N the slots of the widest draft batch, G the number
of KV groups, W the layout's parallel width, D the number of M-RoPE dimensions (0 if the
drafter takes plain positions).
"""

from typing import Annotated, NamedTuple

import torch

from vllm.v1.attention.backends.utils import PAD_SLOT_ID

Int32 = Annotated[torch.Tensor, torch.int32]
Int64 = Annotated[torch.Tensor, torch.int64]
Float32 = Annotated[torch.Tensor, torch.float32]
Addresses = Annotated[torch.Tensor, torch.uint64]
# Hidden states, of any dtype.
States = Annotated[torch.Tensor, None]


class Size(NamedTuple):
    """Shape of a buffer, in the names of the docstring above, and its padding."""

    shape: tuple[str, ...]
    # Value of entries that belong to no request; None if there are none.
    padding: int | None


class VerifiedBatch(NamedTuple):
    """The target's batch after verification; n requests, padded ones at the end.

    A padded request has no query tokens. One whose `idx_mapping` is -1 is a dummy: it
    has slots, but owns no KV blocks and is not sampled.
    """

    input_ids: Int32  # [num_tokens]
    positions: Int64  # [num_tokens]
    query_start_loc: Int32  # [n + 1]
    idx_mapping: Int64  # [n], request state or -1
    num_sampled: Int32  # [n], 0 while a prompt is being chunked
    num_rejected: Int32  # [n]
    last_sampled: Int64  # [R] or [R, 1], by request state
    next_prefill_tokens: Int32  # [R], by request state
    temperature: Float32  # [R], by request state
    seeds: Int64  # [R], by request state
    # If D > 0: [D, at least num_tokens], M-RoPE positions, and [R], by request state,
    # how far they are ahead of `positions` past the prompt.
    rope_positions: Int64 | None = None
    rope_deltas: Int32 | None = None


class PreviousDrafts(NamedTuple):
    """The drafts that a later pass continues from."""

    draft_tokens: Int64  # [n, K]
    stride: int


class KVTables(NamedTuple):
    """The KV blocks that requests hold, by KV group."""

    block_tables: Addresses  # [G], of [R, max_blocks] int32
    strides: Int64  # [G], of the block tables
    block_sizes: Int32  # [G]
    num_blocks: Int32  # [G, R], by request state
    num_blocks_stride: int


class DraftBatch(NamedTuple):
    """The draft batch, as the input kernel writes it and a pass reads it."""

    # By slot.
    input_ids: Annotated[Int32, Size(("N",), 0)]
    positions: Annotated[Int64, Size(("N",), 0)]
    # M-RoPE positions. The additional column is unused: vLLM compiles models for
    # positions that are not contiguous, whatever their number.
    rope_positions: Annotated[Int64, Size(("D", "N + 1"), 0)]
    slot_mappings: Annotated[Int64, Size(("G", "N"), PAD_SLOT_ID)]
    # By request.
    query_start_loc: Annotated[Int32, Size(("R + 1",), 0)]  # padding: the batch's end
    seq_lens: Annotated[Int32, Size(("R",), 0)]
    # Position of the first sampled slot of the first pass: later passes count from it.
    first_positions: Annotated[Int64, Size(("R",), -1)]
    idx_mapping: Annotated[Int64, Size(("R",), -1)]  # request state
    num_blocks: Annotated[Int32, Size(("G", "R"), 0)]  # KV blocks held
    rope_deltas: Annotated[Int32, Size(("R",), 0)]
    # By sampled slot, W per request: the row, the position before the draft's own, and
    # the request state, -1 where nothing may be sampled.
    sample_rows: Annotated[Int64, Size(("R * W",), 0)]
    sample_positions: Annotated[Int64, Size(("R * W",), 0)]
    sample_requests: Annotated[Int64, Size(("R * W",), -1)]
    # By request state: copies, since the engine's change address each step.
    temperature: Annotated[Float32, Size(("R",), None)]
    seeds: Annotated[Int64, Size(("R",), None)]

    max_num_reqs: int  # R
    max_num_tokens: int  # N


class FedStates(NamedTuple):
    """The fallback and the destination of the slots' hidden states."""

    # See HiddenRows.
    fallback: States
    positions: Int64 | None
    kv_group: int
    out: States  # [N, SOURCES * SIZE]


class Numbers(NamedTuple):
    """Numbers of one pass. Upper-case names are constexprs of the kernel."""

    draft_pass: int
    num_reqs: int  # padded ones included
    num_samples: int  # drafts to sample in this pass, at most the width
    num_padded_tokens: int  # rows up to which the batch is padded
    limit: int  # first position that must not be drafted
    mask_token_id: int
    vocab_size: int  # the drafter's; tokens past it, such as images', become 0
    width: int  # the layout's parallel_width
    rope_stride: int  # of the first dimension of rope_positions
    SHIFT: int  # the layout's token_shift
    IS_FIRST: bool
    GROUPS: int
    SOURCES: int  # concatenated in a row of hidden states
    SIZE: int  # elements of a row of one source
    DIMS: int  # D
