# SPDX-License-Identifier: Apache-2.0
"""Every tensor that a draft pass reads, at addresses that never change."""

import torch

from vllm.v1.attention.backends.utils import PAD_SLOT_ID
from vllm.v1.worker.gpu.input_batch import InputBuffers

from .layout import DraftLayout


class DraftBuffers(InputBuffers):
    """The draft batch, as the input kernel writes it and the drafter reads it.

    R is the most requests, N the slots of the widest draft batch, G the number of KV
    groups, W the layout's parallel width, H the drafter's hidden size.

    From InputBuffers, with what padding holds:
        input_ids: [N] int32, 0.
        positions: [N] int64, 0.
        query_start_loc: [R + 1] int32, the end of the batch.
        seq_lens: [R] int32, 0.
    """

    def __init__(
        self,
        layout: DraftLayout,
        max_num_batched_tokens: int,
        max_num_reqs: int,
        device: torch.device,
        hidden_size: int | None = None,
        dtype: torch.dtype | None = None,
    ):
        num_tokens = layout.max_num_tokens(max_num_batched_tokens, max_num_reqs)
        super().__init__(max_num_reqs, num_tokens, device)

        def int64(size: int) -> torch.Tensor:
            return torch.empty(size, dtype=torch.int64, device=device)

        # [G, N], padding PAD_SLOT_ID; allocated once the KV groups are known.
        self.slot_mappings = torch.empty(0, 0, dtype=torch.int64, device=device)
        # The requests of the batch, [R]. Request state, -1 for padding; position of
        # the first sampled slot of the first pass, -1 for padding: later passes count
        # on from it; and [G, R] int32, the KV blocks held, padding is left as it is.
        self.idx_mapping, self.first_positions = (
            int64(max_num_reqs),
            int64(max_num_reqs),
        )
        self.num_blocks = torch.empty(0, 0, dtype=torch.int32, device=device)
        # The sampled slots, W per request: row of the draft batch, position before
        # the draft's own, request state. Padding, and a slot that must not be
        # sampled: a row in range, and request -1.
        num_samples = max_num_reqs * layout.parallel_width
        self.sample_rows, self.sample_positions, self.sample_requests = (
            int64(num_samples) for _ in range(3)
        )
        # [R], by request state: copies, since the engine's own move each step.
        self.temperature = torch.zeros(max_num_reqs, device=device)
        self.seeds = torch.zeros(max_num_reqs, dtype=torch.int64, device=device)

        # For a drafter that is fed hidden states; padding is left as it is.
        # [N, what it takes of the target]; allocated once that width is known.
        self.fed: torch.Tensor | None = None
        # Later passes: [R * W, H], the drafter's output at the sampled slots of the
        # pass before, and [R * (2W - 1), H], the same laid out over the slots.
        self.feedback: torch.Tensor | None = None
        self.own_rows: torch.Tensor | None = None
        # [largest piecewise graph, H], what such a graph reads.
        self.combined: torch.Tensor | None = None
        if hidden_size is not None and layout.num_passes > 1:
            self.feedback, self.own_rows = (
                torch.zeros(rows, hidden_size, dtype=dtype, device=device)
                for rows in (num_samples, max_num_reqs * layout.num_follow_slots)
            )
        self.reset()

    def allocate_kv_groups(self, num_kv_groups: int) -> None:
        self.slot_mappings = torch.full(
            (num_kv_groups, self.max_num_tokens),
            PAD_SLOT_ID,
            dtype=torch.int64,
            device=self.device,
        )
        self.num_blocks = torch.zeros(
            (num_kv_groups, self.max_num_reqs), dtype=torch.int32, device=self.device
        )

    def fed_rows(self, like: torch.Tensor) -> torch.Tensor:
        """`fed`, allocated by the first batch: only the target knows how wide it is.

        Args:
            like: [width] or [any, width], in the dtype of the hidden states.
        """
        if self.fed is None:
            self.fed = like.new_zeros(self.max_num_tokens, like.shape[-1])
        return self.fed

    def at_lasting_address(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """A copy where piecewise graphs read it; the first one is the largest."""
        if self.combined is None:
            self.combined = torch.empty_like(hidden_states)
        return self.combined[: len(hidden_states)].copy_(hidden_states)

    def lay_out_uniform(self, num_reqs: int, query_len: int) -> None:
        """A batch of dummy requests, as a graph of that shape is recorded on."""
        self.reset()
        ends = torch.arange(1, num_reqs + 1, device=self.device) * query_len
        self.query_start_loc[1 : num_reqs + 1] = ends
        self.query_start_loc[num_reqs + 1 :] = num_reqs * query_len
        self.seq_lens[:num_reqs] = query_len
        self.first_positions[:num_reqs] = 0

    def reset(self) -> None:
        """Makes the whole batch padding: a run over it changes nothing."""
        for tensor in (self.input_ids, self.positions, self.sample_rows):
            tensor.zero_()
        for tensor in (self.query_start_loc, self.seq_lens, self.sample_positions):
            tensor.zero_()
        self.num_blocks.zero_()
        self.slot_mappings.fill_(PAD_SLOT_ID)
        for tensor in (self.first_positions, self.idx_mapping, self.sample_requests):
            tensor.fill_(-1)
