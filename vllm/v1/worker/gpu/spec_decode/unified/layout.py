# SPDX-License-Identifier: Apache-2.0
"""The slots (rows) of a draft batch, and what a step drafts over them. All slot counts
are computed here.

In each step the drafter receives `q` target tokens per request, of which `r` were
rejected and `v = q - r` are valid. The first draft pass has these slots
(K = `num_speculative_tokens`, W = `parallel_width`, x = padding):

    token_shift 0   t0 t1 .. t(v-1)  next  mask x (W-1)  x x (r)    q + W slots
    token_shift 1      t1 .. t(v-1)  next  mask x (W-1)  x x (r)    q + W - 1 slots

Slot j has the position of the request's j-th target token, whatever token it holds.
`next` is the token just sampled, or the next prompt token while a prompt is being
chunked. Drafts 1 to W are sampled at the W slots from `next` on.

A drafter that takes the target's hidden states gets, with each token, the hidden state
of the preceding token. With token_shift 1, that of slot j is row j of the step, and
masks have a learned one. With token_shift 0 it is row j - 1, and masks share that of
`next`; slot 0 then has no row in this step, and takes the hidden state that was stored
with the KV cache block of the preceding token (`drafters/pard2.py`), or a dedicated row
at position 0.

If W < K, later passes follow. The inputs of each are the W drafts of the previous pass
and W - 1 masks after them; it samples the next W drafts:

    later pass      d(i+1) .. d(i+W)  mask x (W-1)                  2W - 1 slots

In a step that drafts trees with W = 1, later passes continue B nodes of the depth
above: B slots that share a position (`tree/grow.py`).

W = 1 is autoregressive drafting (arXiv 2211.17192; EAGLE, arXiv 2401.15077), W = K
drafts all tokens at once (PARD, arXiv 2504.18583; P-EAGLE, vLLM PR #32887; PARD-2,
arXiv 2605.08632, which takes the target's hidden states unshifted).
"""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple


@dataclass(frozen=True)
class DraftLayout:
    """The slot counts of a drafting mode.

    Attributes:
        num_speculative_tokens: drafts per request and step (K).
        token_shift: 1 if hidden state i is paired with token i + 1 (EAGLE), 0 if
            slots hold the tokens themselves (draft models).
        parallel_width: drafts sampled per pass (W), from 1 to K.
        num_beams: nodes that each later pass continues (B); more than 1 only with
            trees, and with W = 1.
    """

    num_speculative_tokens: int
    token_shift: int
    parallel_width: int = 1
    num_beams: int = 1

    def for_drafts(self, num_drafts: int) -> "DraftLayout":
        """The layout of a step whose drafts are `num_drafts` deep; 0 counts as 1."""
        k = min(max(num_drafts, 1), self.num_speculative_tokens)
        width = min(self.parallel_width, k)
        return replace(self, num_speculative_tokens=k, parallel_width=width)

    @property
    def num_masks(self) -> int:
        """Mask slots of a request in each pass."""
        return self.parallel_width - 1

    @property
    def num_extra_slots(self) -> int:
        """Slots that the first pass adds to a request's target tokens."""
        return self.parallel_width - self.token_shift

    @property
    def num_follow_slots(self) -> int:
        """Slots of a request in each later pass."""
        return (2 * self.parallel_width - 1) * self.num_beams

    @property
    def num_follow_samples(self) -> int:
        """Sampled slots of a request in each later pass, its last ones."""
        return self.parallel_width * self.num_beams

    @property
    def num_passes(self) -> int:
        return -(-self.num_speculative_tokens // self.parallel_width)

    @property
    def num_room_tokens(self) -> int:
        """Positions past the longest sequence that `seq_lens` may reach: it counts
        padding slots too, so that causal attention aligns the valid ones."""
        later = self.num_passes * self.num_follow_samples
        return self.num_extra_slots + later

    def max_num_tokens(self, max_num_batched_tokens: int, max_num_reqs: int) -> int:
        """Slots of the widest draft batch, which buffers and compile range cover."""
        first = max_num_batched_tokens + self.num_extra_slots * max_num_reqs
        later = self.num_follow_slots * max_num_reqs if self.num_passes > 1 else 0
        return max(first, later)


class DraftPlan(NamedTuple):
    """The plan of a step that asks for `num_drafts` tokens of each request.

    If they are more than the layout's K, they are the nodes of a tree of depth K. A
    tree is built in the only pass, or after the last one.
    """

    num_drafts: int
    layout: DraftLayout
    # The numbers of drafts whose graphs it replays, in the first and in later passes.
    recorded_as: int
    later_recorded_as: int

    @property
    def is_tree(self) -> bool:
        return self.num_drafts > self.layout.num_speculative_tokens

    def num_samples(self, draft_pass: int) -> int:
        """Drafts sampled in a pass. Without drafts the first pass still runs: it
        writes the verified tokens' KV."""
        left = self.num_drafts - draft_pass * self.layout.parallel_width
        return min(left, self.layout.parallel_width)


def draft_plans(widest: DraftLayout, depths: Mapping[int, int]) -> dict[int, DraftPlan]:
    """A plan for each number of drafts that a step may ask for.

    Args:
        depths: by number of drafts, the most that can be accepted.
    """
    plans = {}
    for k, depth in sorted(depths.items()):
        plan = DraftPlan(k, widest.for_drafts(depth), k, k)
        if not plan.is_tree:
            plan = plan._replace(layout=replace(plan.layout, num_beams=1))
        plans[k] = plan

    # The largest number of drafts whose passes are the same.
    first = {_first_pass(plan): k for k, plan in plans.items()}
    later = {_later_passes(plan, widest): k for k, plan in plans.items()}
    return {
        k: plan._replace(
            recorded_as=first[_first_pass(plan)],
            later_recorded_as=later[_later_passes(plan, widest)],
        )
        for k, plan in plans.items()
    }


def _first_pass(plan: DraftPlan) -> Hashable:
    """Equal for plans with the same first pass.

    A step without drafts samples nothing in it, and a tree drafted in one pass is built
    in it, so these two share it with no other. Trees of several passes share theirs.
    """
    if not plan.num_drafts or (plan.is_tree and plan.layout.num_passes == 1):
        return plan.num_drafts
    return plan.layout.parallel_width, plan.is_tree


def _later_passes(plan: DraftPlan, widest: DraftLayout) -> Hashable:
    """Equal for plans whose later passes are the same, as far as each has them.

    With one token per pass, pass p is the same however many follow. With several, the
    last pass may sample fewer. Passes of trees keep several candidates.
    """
    return plan.num_drafts if widest.parallel_width > 1 else plan.is_tree
