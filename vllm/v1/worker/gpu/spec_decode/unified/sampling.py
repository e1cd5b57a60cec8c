# SPDX-License-Identifier: Apache-2.0
"""Samples a chain of drafts: one at each sampled slot of a pass.

Greedy drafts are the most likely tokens. Probabilistic ones are sampled from the
drafter's distribution, against which speculative sampling verifies them
(arXiv 2211.17192, arXiv 2302.01318; as a block, arXiv 2403.10444), by the Gumbel-max
trick: argmax(logits / temperature + noise). `noise.py` says which noise, and why.
"""

from typing import TYPE_CHECKING

import torch

from vllm.v1.worker.gpu.spec_decode.noise import draft_keys

from .plan import DraftPlan

if TYPE_CHECKING:
    from .speculator import UnifiedSpeculator


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
    num_reqs, samples, size = hidden_states.shape
    batch, width = speculator.buffers.batch, plan.layout.parallel_width

    def sampled(tensor: torch.Tensor) -> torch.Tensor:
        return tensor[: num_reqs * width].view(num_reqs, width)[:, :samples]

    keys, requests = sampled(batch.sample_positions), sampled(batch.sample_requests)
    columns = plan.columns[draft_pass, :num_reqs, :samples]
    done = draft_pass * width
    drafts = speculator.draft_tokens[:num_reqs, done : done + samples]
    for part in speculator.slices(num_reqs, samples):
        part_keys, part_columns = keys[part].flatten(), columns[part].flatten()
        if speculator.draft_logits is not None:
            most = speculator.num_speculative_steps
            blocks = speculator.verifies_blocks
            part_keys = draft_keys(part_keys, part_columns, most, blocks)
        tokens = speculator.sample_draft(
            hidden_states[part].reshape(-1, size),
            part_keys,
            requests[part].flatten(),
            speculator.temperature,
            speculator.seeds,
            part_columns,
            speculator.draft_logits,
        )
        ids = speculator.drafter.vocabulary.target_ids(tokens)
        drafts[part].copy_(ids.view(-1, samples))
