# SPDX-License-Identifier: Apache-2.0
"""Samples a chain of drafts: one at each sampled slot of a pass.

Greedy drafts are the most likely tokens. Probabilistic ones are sampled from the
drafter's distribution, against which speculative sampling verifies them
(arXiv 2211.17192, arXiv 2302.01318; as a block, arXiv 2403.10444), by the Gumbel-max
trick: argmax(logits / temperature + noise). `noise.py` says which noise, and why.
"""

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from .plan import DraftPlan

if TYPE_CHECKING:
    from .speculator import UnifiedSpeculator


MOST_KEPT = 4096


class SampledSlots(NamedTuple):
    """Slots that a pass samples, of some of its requests: views of the buffers."""

    requests: slice
    keys: torch.Tensor  # [S], position of each
    states: torch.Tensor  # [S], of its request
    columns: torch.Tensor  # [S], of `draft_logits`
    drafts: torch.Tensor  # [requests, samples]


def sample_chain(
    speculator: "UnifiedSpeculator",
    hidden_states: torch.Tensor,
    plan: DraftPlan,
    draft_pass: int,
) -> None:
    """Samples the drafts of a pass into `speculator.draft_tokens`.

    Args:
        speculator: its buffers, draft model and draft logits are used.
        hidden_states: [num_reqs, samples, H], the model's output at sampled slots.
        plan: of the step.
        draft_pass: the pass, from 0.
    """
    samples, size = hidden_states.shape[1:]
    for slots in _sampled_slots(speculator, plan, draft_pass, *hidden_states.shape[:2]):
        tokens = speculator.sample_draft(
            hidden_states[slots.requests].reshape(-1, size),
            slots.keys,
            slots.states,
            speculator.temperature,
            speculator.seeds,
            slots.columns,
            speculator.draft_logits,
        )
        ids = speculator.drafter.vocabulary.target_ids(tokens)
        slots.drafts.copy_(ids.view(-1, samples))


def _sampled_slots(
    speculator: "UnifiedSpeculator",
    plan: DraftPlan,
    draft_pass: int,
    num_reqs: int,
    samples: int,
) -> list[SampledSlots]:
    """The slots of a pass, by slice of its requests.

    They are kept for later steps of as many requests: on a CPU making them takes as
    long as sampling a few.
    """
    batch, width = speculator.buffers.batch, plan.layout.parallel_width
    kept, key = speculator.sampled_slots, (plan.num_drafts, draft_pass, num_reqs)
    if (found := kept.get(key)) is not None:
        return found

    def sampled(rows: torch.Tensor, part: slice) -> torch.Tensor:
        return rows[: num_reqs * width].view(num_reqs, width)[part, :samples].flatten()

    done = draft_pass * width
    drafts = speculator.draft_tokens[:num_reqs, done : done + samples]
    found = [
        SampledSlots(
            part,
            sampled(batch.sample_positions, part),
            sampled(batch.sample_requests, part),
            plan.columns[draft_pass, part, :samples].flatten(),
            drafts[part],
        )
        for part in speculator.slices(num_reqs, samples)
    ]
    if samples == width:  # else some are copies
        keep(kept, key, found)
    return found


def keep(kept: dict[tuple[int, ...], Any], key: tuple[int, ...], value: Any) -> None:
    """Keeps what is made for a step, for others of the same kind."""
    if len(kept) >= MOST_KEPT:
        kept.clear()
    kept[key] = value
