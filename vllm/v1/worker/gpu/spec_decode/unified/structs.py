# SPDX-License-Identifier: Apache-2.0
"""What the input kernel takes: each field is declared here, and only here.

The Triton kernel takes these tuples as they are, and `buffers.py` allocates the draft
batch from its declaration. For the native implementation each tuple is a C struct of
the same fields: `csrc/write_structs.py` writes `csrc/structs.h` from this module.

R is the most requests, N the slots of the widest draft batch, G the number of KV
groups, W the layout's parallel width, D the dimensions of M-RoPE positions, which are
0 where the drafter takes plain ones.
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
    """Sizes of a buffer, by the names in the docstring above, and its padding."""

    shape: tuple[str, ...]
    # What the rows hold that belong to no request; None where there are none.
    padding: int | None


class VerifiedBatch(NamedTuple):
    """The target's batch after verification; n requests, padded ones at the end.

    A padded request has no query tokens. One whose `idx_mapping` is -1 is a dummy: it
    takes its slots, but owns no KV blocks and is not sampled.
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
    # Where D > 0: [D, at least num_tokens], M-RoPE positions, and [R], by request
    # state, what they are ahead of `positions` past the prompt.
    rope_positions: Int64 | None = None
    rope_deltas: Int32 | None = None


class PreviousDrafts(NamedTuple):
    """The drafts that a later pass goes on from."""

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

    # Its slots.
    input_ids: Annotated[Int32, Size(("N",), 0)]
    positions: Annotated[Int64, Size(("N",), 0)]
    # M-RoPE's, of which a row more is never used: vLLM compiles models for positions
    # that are not contiguous, however many there are.
    rope_positions: Annotated[Int64, Size(("D", "N + 1"), 0)]
    slot_mappings: Annotated[Int64, Size(("G", "N"), PAD_SLOT_ID)]
    # Its requests.
    query_start_loc: Annotated[Int32, Size(("R + 1",), 0)]  # padding: the batch's end
    seq_lens: Annotated[Int32, Size(("R",), 0)]
    # Position of the first sampled slot of the first pass: later passes go on from it.
    first_positions: Annotated[Int64, Size(("R",), -1)]
    idx_mapping: Annotated[Int64, Size(("R",), -1)]  # request state
    num_blocks: Annotated[Int32, Size(("G", "R"), 0)]  # KV blocks held
    rope_deltas: Annotated[Int32, Size(("R",), 0)]
    # Its sampled slots, W per request: the row, the position before the draft's own,
    # and the request state, -1 where nothing may be sampled.
    sample_rows: Annotated[Int64, Size(("R * W",), 0)]
    sample_positions: Annotated[Int64, Size(("R * W",), 0)]
    sample_requests: Annotated[Int64, Size(("R * W",), -1)]
    # By request state: copies, since the engine's own move each step.
    temperature: Annotated[Float32, Size(("R",), None)]
    seeds: Annotated[Int64, Size(("R",), None)]

    max_num_reqs: int  # R
    max_num_tokens: int  # N


class FedStates(NamedTuple):
    """Where the hidden states of slots come from beside their sources, and go."""

    # See HiddenRows.
    fallback: States
    positions: Int64 | None
    kv_group: int
    out: States  # [N, SOURCES * SIZE]


class Numbers(NamedTuple):
    """Of one pass. Upper-case names are constants of a compiled kernel."""

    draft_pass: int
    num_reqs: int  # padded ones included
    num_samples: int  # drafts to sample in this pass, at most the width
    num_padded_tokens: int  # rows up to which the batch is padded
    limit: int  # first position that must not be drafted
    mask_token_id: int
    vocab_size: int  # the drafter's; tokens past it, as of images, are laid out as 0
    width: int  # the layout's parallel_width
    rope_stride: int  # of the dimensions of rope_positions
    SHIFT: int  # the layout's token_shift
    IS_FIRST: bool
    GROUPS: int
    SOURCES: int  # that a row of hidden states is put together from
    SIZE: int  # elements of a row of one source
    DIMS: int  # D


STRUCTS = (VerifiedBatch, PreviousDrafts, KVTables, DraftBatch, FedStates, Numbers)
