# SPDX-License-Identifier: Apache-2.0
"""What a step drafts, over which slots, and how its passes run."""

from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, NamedTuple

import torch

from vllm.config.compilation import CUDAGraphMode

from .layout import DraftLayout


class DraftPlan(NamedTuple):
    """The plan of a step that asks for `num_drafts` tokens of each request.

    If they are more than the layout's K, they are the nodes of a tree of depth K. A
    tree is built in the only pass, or after the last one.
    """

    num_drafts: int
    layout: DraftLayout
    # [passes, R, W] int32, column of `draft_logits` for each sampled slot
    columns: torch.Tensor
    # The numbers of drafts whose graphs it replays, in the first and in later passes.
    recorded_as: int
    later_recorded_as: int

    @property
    def is_tree(self) -> bool:
        return is_tree(self.num_drafts, self.layout)

    def num_samples(self, draft_pass: int) -> int:
        """Drafts sampled in a pass. Without drafts the first pass still runs: it
        writes the verified tokens' KV."""
        left = self.num_drafts - draft_pass * self.layout.parallel_width
        return min(left, self.layout.parallel_width)


class PassContext(NamedTuple):
    """How the draft model runs over the batch in the buffers."""

    num_reqs: int
    num_tokens: int  # padding included
    attn_metadata: dict[str, Any] | None = None
    slot_mappings: dict[str, torch.Tensor] | None = None
    num_tokens_across_dp: torch.Tensor | None = None
    mode: CUDAGraphMode = CUDAGraphMode.NONE


def is_tree(num_drafts: int, layout: DraftLayout) -> bool:
    """Whether so many drafts are nodes of a tree, whose depth is the layout's K."""
    return num_drafts > layout.num_speculative_tokens


def draft_plans(
    widest: DraftLayout,
    depths: Mapping[int, int],
    max_num_reqs: int,
    device: torch.device,
) -> dict[int, DraftPlan]:
    """A plan for each number of drafts that a step may ask for.

    Args:
        depths: by number of drafts, the most that can be accepted.
    """
    layouts = {k: widest.for_drafts(depth) for k, depth in depths.items()}
    first, later = same_first_passes(layouts), same_later_passes(layouts)
    return {
        k: DraftPlan(
            k, layout, _columns(layout, max_num_reqs, device), first[k], later[k]
        )
        for k, layout in layouts.items()
    }


def _columns(
    layout: DraftLayout, max_num_reqs: int, device: torch.device
) -> torch.Tensor:
    passes, width = layout.num_passes, layout.parallel_width
    columns = torch.arange(passes * width, dtype=torch.int32, device=device)
    return columns.view(passes, 1, width).repeat(1, max_num_reqs, 1)


def same_first_passes(layouts: dict[int, DraftLayout]) -> dict[int, int]:
    """For each number of drafts, the largest one whose first pass is the same.

    A step without drafts samples nothing in it, and a tree drafted in one pass is built
    in it, so these two share it with no other. Trees of several passes share theirs.
    """

    def kind(num_drafts: int) -> Hashable:
        layout = layouts[num_drafts]
        of_tree = is_tree(num_drafts, layout)
        if not num_drafts or (of_tree and layout.num_passes == 1):
            return num_drafts, of_tree
        return layout.parallel_width, of_tree, "shared"

    return _largest_of_kind(layouts, kind)


def same_later_passes(layouts: dict[int, DraftLayout]) -> dict[int, int]:
    """For each number of drafts, the largest one that has all its later passes.

    With one token per pass, pass p is the same however many follow. With several, the
    last pass may sample fewer. Passes of trees keep several candidates.
    """

    def kind(num_drafts: int) -> Hashable:
        if layouts[max(layouts)].parallel_width > 1:
            return num_drafts
        return is_tree(num_drafts, layouts[num_drafts])

    return _largest_of_kind(layouts, kind)


def _largest_of_kind(
    numbers: Iterable[int], kind: Callable[[int], Hashable]
) -> dict[int, int]:
    largest: dict[Hashable, int] = {}
    for number in sorted(numbers):
        largest[kind(number)] = number
    return {number: largest[kind(number)] for number in numbers}
