# SPDX-License-Identifier: Apache-2.0
"""Seam on `vllm/v1/worker/gpu/spec_decode/rejection_sampler.py`.

Why: what a seeded request draws depends on preemption and on what is in its batch.
    Output is not distributed as the target's where block verification meets again what
    it has decided by, and where a grammar takes drafts off that were drawn.
How: with the unified speculator seeded requests take the tokens that the target draws
    alone; what verifies the others has keys of its own: see `noise.py`. The first draft
    that a grammar took off is verified: see `misfits.py`.
Upstream: "[Spec Decode] Seeds reproduce under any schedule", "… Block
    verification draws from fresh noise", "… Verify first drafts grammars take off".
Until: upstream does all three.
"""

import torch

from vllm._upstream import stand_on
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.spec_decode.misfits import without_first_misfits
from vllm.v1.worker.gpu.spec_decode.noise import draw_alone, verify_keys

upstream = stand_on(__name__)
_rejection_sample = upstream.rejection_sample


def rejection_sample(logits, draft_logits, drafts, starts, pos, *args, **more):
    """See the base's function of this name."""
    block = more["use_block_verification"]
    if block or draft_logits is not None:
        pos = verify_keys(pos, columns=args[2], num_drafts=args[5], block=block)
    return _rejection_sample(logits, draft_logits, drafts, starts, pos, *args, **more)


class RejectionSampler(upstream.RejectionSampler):
    """Verifies seeded requests by what the target draws alone, and first misfits."""

    def __call__(self, logits, input_batch, draft_logits=None, invalid_drafts=None):
        if draft_logits is not None and self.synthetic_conditional_rates is None:
            invalid_drafts = without_first_misfits(invalid_drafts, logits, input_batch)
        return super().__call__(logits, input_batch, draft_logits, invalid_drafts)

    def _verify(self, *args):
        logits, sampled, num_sampled = super()._verify(*args)
        _, _, _, pos, starts, _, states_np, row_states, *_, drafts = args
        states = self.sampler.sampling_states
        # Nothing to keep where acceptance is made up, or a watermark decides draws.
        free = self.synthetic_conditional_rates is None and self.watermark_key is None
        if not free or not states.any_explicit_seed(states_np):
            return logits, sampled, num_sampled
        stream = (row_states, states.temperature.gpu, states.seeds.gpu)
        rest = (self.num_speculative_steps, self.sampler.use_fp64_gumbel)
        tokens, count = draw_alone(logits, drafts, pos, starts, *stream, *rest)
        seeded = async_tensor_h2d(states.seeds_set[states_np], device=pos.device)
        sampled = torch.where(seeded[:, None], tokens, sampled)
        return logits, sampled, torch.where(seeded, count, num_sampled)


upstream.rejection_sample = rejection_sample
upstream.RejectionSampler = RejectionSampler
