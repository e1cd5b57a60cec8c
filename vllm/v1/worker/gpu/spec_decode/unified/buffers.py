# SPDX-License-Identifier: Apache-2.0
"""Every tensor that a draft pass reads, at fixed addresses."""

from typing import get_type_hints

import torch

from .layout import DraftLayout
from .structs import DraftBatch, Size

# Name, dtype and size of each tensor of a draft batch.
_TENSORS: dict[str, tuple[torch.dtype, Size]] = {
    name: hint.__metadata__
    for name, hint in get_type_hints(DraftBatch, include_extras=True).items()
    if hint is not int
}


def allocate_batch(
    max_num_reqs: int,
    max_num_tokens: int,
    width: int,
    num_kv_groups: int,
    device: torch.device,
    rope_dims: int = 0,
) -> DraftBatch:
    """A draft batch that is all padding."""
    sizes = {
        "N": max_num_tokens,
        "N + 1": max_num_tokens + 1,
        "D": rope_dims,
        "G": num_kv_groups,
        "R": max_num_reqs,
        "R + 1": max_num_reqs + 1,
        "R * W": max_num_reqs * width,
    }
    tensors = {
        name: torch.full(
            [sizes[each] for each in size.shape],
            size.padding or 0,
            dtype=dtype,
            device=device,
        )
        for name, (dtype, size) in _TENSORS.items()
    }
    return DraftBatch(
        **tensors, max_num_reqs=max_num_reqs, max_num_tokens=max_num_tokens
    )


class DraftBuffers:
    """The draft batch, and the hidden states that a drafter is fed with it.

    H is the drafter's hidden size; other letters are those of `structs.py`. Padding
    rows of hidden states keep whatever they held.
    """

    def __init__(
        self,
        layout: DraftLayout,
        max_num_batched_tokens: int,
        max_num_reqs: int,
        device: torch.device,
        hidden_size: int | None = None,
        dtype: torch.dtype | None = None,
        rope_dims: int = 0,
    ):
        self.width, self.device = layout.parallel_width, device
        self.rope_dims = rope_dims
        num_tokens = layout.max_num_tokens(max_num_batched_tokens, max_num_reqs)
        self.batch = self._batch(max_num_reqs, num_tokens, num_kv_groups=0)
        # [N, width of the target's hidden states]; allocated once that is known.
        self.fed: torch.Tensor | None = None
        # Later passes: [R * W, H], the drafter's output at the sampled slots of the
        # previous pass, and [R * (2W - 1), H], the same distributed to the slots.
        self.feedback: torch.Tensor | None = None
        self.own_rows: torch.Tensor | None = None
        # By name, [largest piecewise graph, ...], the inputs of piecewise graphs.
        self.lasting: dict[str, torch.Tensor] = {}
        # For the first pass: multimodal embeddings and their rows, [rows] int64 on the
        # CPU; None if there are none.
        self.multimodal: tuple[list[torch.Tensor], torch.Tensor] | None = None
        if hidden_size is not None and layout.num_passes > 1:
            counts = max_num_reqs * self.width, max_num_reqs * layout.num_follow_slots
            self.feedback, self.own_rows = (
                torch.zeros(rows, hidden_size, dtype=dtype, device=device)
                for rows in counts
            )

    def allocate_kv_groups(self, num_kv_groups: int) -> None:
        """Reallocates the batch, once the number of KV groups is known."""
        sizes = self.batch.max_num_reqs, self.batch.max_num_tokens
        self.batch = self._batch(*sizes, num_kv_groups)

    def _batch(
        self, max_num_reqs: int, max_num_tokens: int, num_kv_groups: int
    ) -> DraftBatch:
        sizes = max_num_reqs, max_num_tokens, self.width, num_kv_groups
        return allocate_batch(*sizes, self.device, self.rope_dims)

    def positions(self, num_tokens: int) -> torch.Tensor:
        """The draft model's positions: [num_tokens], or [D, num_tokens] of M-RoPE."""
        if self.rope_dims:
            return self.batch.rope_positions[:, :num_tokens]
        return self.batch.positions[:num_tokens]

    def fed_rows(self, like: torch.Tensor) -> torch.Tensor:
        """`fed`, allocated on the first batch, which has the target's width.

        Args:
            like: [width] or [any, width], in the dtype of the hidden states.
        """
        if self.fed is None:
            self.fed = like.new_zeros(self.batch.max_num_tokens, like.shape[-1])
        return self.fed

    def hidden_states(self, num_tokens: int, is_first: bool) -> torch.Tensor:
        """[num_tokens, ...], hidden states for the slots of a pass."""
        rows = self.fed if is_first else self.own_rows
        assert rows is not None
        return rows[:num_tokens]

    def at_lasting_address(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        """Copies rows to where piecewise graphs read them. The first call must have the
        most rows."""
        if name not in self.lasting:
            self.lasting[name] = torch.empty_like(rows)
        return self.lasting[name][: len(rows)].copy_(rows)

    def lay_out_evenly(self, num_reqs: int, num_tokens: int) -> None:
        """Writes dummy requests that share the rows evenly, to capture a graph on."""
        self.reset()
        batch = self.batch
        starts = torch.arange(num_reqs + 1, device=self.device) * num_tokens // num_reqs
        batch.query_start_loc[: num_reqs + 1] = starts
        batch.query_start_loc[num_reqs + 1 :] = num_tokens
        batch.seq_lens[:num_reqs] = starts.diff()
        batch.first_positions[:num_reqs] = 0

    def reset(self) -> None:
        """Makes the whole batch padding, so that a pass over it changes nothing."""
        for name, (_, size) in _TENSORS.items():
            if size.padding is not None:
                getattr(self.batch, name).fill_(size.padding)
