# SPDX-License-Identifier: Apache-2.0
"""Every tensor that a draft pass reads, at addresses that never change."""

import torch

from vllm.v1.attention.backends.utils import PAD_SLOT_ID
from vllm.v1.worker.gpu.input_batch import InputBuffers

from .layout import DraftLayout


class DraftBuffers(InputBuffers):
    """The draft batch, as the input kernel writes it and the drafter reads it.

    R is the most requests, N the slots of the widest draft batch, G the number of KV
    groups, W the layout's parallel width, H the width of the fed hidden states.

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
        num_samples = max_num_reqs * layout.parallel_width

        # [G, N], padding PAD_SLOT_ID; allocated once the KV groups are known.
        self.slot_mappings = torch.empty(0, 0, dtype=torch.int64, device=device)
        # [N, H], padding is left as it is; None for a drafter that takes none.
        self.hidden_states: torch.Tensor | None = None
        if hidden_size is not None:
            shape = (num_tokens, hidden_size)
            self.hidden_states = torch.zeros(shape, dtype=dtype, device=device)

        # Position of the first sampled slot of the first pass, -1 for padding: later
        # passes count on from it.
        self.first_positions = torch.empty(
            max_num_reqs, dtype=torch.int64, device=device
        )
        # The sampled slots, W per request: row of the draft batch, position before
        # the draft's own, request state. Padding, and a slot that must not be
        # sampled: a row in range, and request -1.
        self.sample_rows, self.sample_positions, self.sample_requests = (
            torch.empty(num_samples, dtype=torch.int64, device=device) for _ in range(3)
        )
        self.reset()

    def allocate_slot_mappings(self, num_kv_groups: int) -> None:
        self.slot_mappings = torch.full(
            (num_kv_groups, self.max_num_tokens),
            PAD_SLOT_ID,
            dtype=torch.int64,
            device=self.device,
        )

    def reset(self) -> None:
        """Makes the whole batch padding: a run over it changes nothing."""
        for tensor in (self.input_ids, self.positions, self.sample_rows):
            tensor.zero_()
        for tensor in (self.query_start_loc, self.seq_lens, self.sample_positions):
            tensor.zero_()
        self.slot_mappings.fill_(PAD_SLOT_ID)
        self.first_positions.fill_(-1)
        self.sample_requests.fill_(-1)
