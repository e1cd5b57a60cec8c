# SPDX-License-Identifier: Apache-2.0
"""Verification of drafts: the keys of the random noise that tokens are sampled with,
and the drafts that are not accepted, whatever the target says.

vLLM derives the noise from the request's seed, a key and the token id. The key is the
position before the token. So key p gives the token that the target, without drafts,
samples after position p.

Requests with a seed: the token after p is always that one, with or without drafts, so
that other requests, preemption or another number of drafts cannot change it. Drafts are
sampled with the same key: where drafter and target agree, so do the sampled tokens.
vLLM itself adds a salt to a draft's key, and its number within the step to the seed.

Requests without a seed: a draft is accepted by the ratio of probabilities, which
requires noise that is independent of the draft's. Verification has its own keys.

Block verification uses drafts and noise past the draft that it rejects, which the next
step must not use again: vLLM's keys ensure that, and are used with it.

Excluded drafts have rows like the others of their batch: a batch of equal query lengths
has a FULL CUDA graph. There are three kinds of them.

- Drafts that a grammar has invalidated, but the first. Its probability under the
  target is 0, so it is rejected. But it has to be rejected, not dropped: the token in
  its place is then sampled from the residual distribution. If it were dropped, that
  token would be sampled from the target's whole distribution, and tokens that the
  drafter prefers would be sampled too often.
- Drafts at positions past the drafter's context, which are placeholders.
- Drafts of requests with `disable_spec_decode`: output is what the target samples
  without drafts.
"""

from typing import TYPE_CHECKING

import numpy as np
import torch

from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.sample.gumbel import _DRAFT_NOISE_SALT, gumbel_sample
from vllm.v1.worker.gpu.spec_decode.argmax import best_tokens

if TYPE_CHECKING:
    from vllm.config.drafter import DrafterConfig
    from vllm.config.speculative import SpeculativeConfig
    from vllm.v1.worker.gpu.sample.sampler import Sampler
    from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler

# vLLM's sampler adds this to a draft's key. Without Triton it is a plain number.
DRAFT_SALT = int(getattr(_DRAFT_NOISE_SALT, "value", _DRAFT_NOISE_SALT))
VERIFY_SALT = DRAFT_SALT // 2  # positions stay far below it


def draw_alone(
    sampler: "Sampler",
    logits: torch.Tensor,
    states: torch.Tensor,
    states_np: np.ndarray,
    positions: torch.Tensor,
) -> torch.Tensor:
    """[rows] int64, the tokens that the target samples without drafts.

    Args:
        logits: [rows, V], processed, temperature included.
        states: [rows], request state of each row.
        states_np: [requests] request states.
        positions: [rows] int64.
    """
    known = sampler.sampling_states
    is_greedy = not known.temperature.np[states_np].any()
    # Processed logits are float32, for which no warm-up step compiles the search.
    if is_greedy and (logits.is_cpu or logits.dtype != torch.float32):
        return best_tokens(logits)
    return gumbel_sample(
        logits,
        states,
        known.temperature.gpu,
        known.seeds.gpu,
        positions,
        apply_temperature=False,
        is_drafting=False,
        use_fp64=sampler.use_fp64_gumbel,
    )


def follow_chains(
    drawn: torch.Tensor,
    drafts: torch.Tensor,
    cu_num_logits: torch.Tensor,
    num_drafts: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The drawn tokens of each request, as far as its drafts match them.

    Args:
        drawn: [rows] int64; a row before each draft of a request and one after the
            last.
        drafts: [rows], the token that led to each row; negative is never accepted.
        cu_num_logits: [requests + 1] int32.
        num_drafts: the most of a step (K).

    Returns:
        [requests, K + 1] int64 tokens, and [requests] int32, how many of them count.
    """
    steps = torch.arange(num_drafts + 1, device=drawn.device)
    last = cu_num_logits[1:, None] - 1
    rows = torch.minimum(cu_num_logits[:-1, None] + steps, last)
    tokens, has_draft = drawn[rows], rows < last
    foreseen = has_draft & (drafts[torch.where(has_draft, rows + 1, rows)] == tokens)
    return tokens, 1 + foreseen.int().cumprod(1).sum(1, dtype=torch.int32)


def rejection_keys(
    sampler: "RejectionSampler",
    draft_logits: torch.Tensor | None,
    positions: torch.Tensor,
) -> torch.Tensor:
    """[n] int64 positions for `rejection_sample`: verification keys if it needs them.

    Args:
        draft_logits: None if drafts are greedy.
        positions: [n] int64, of each row.
    """
    # Drafts of other speculators were sampled with other keys.
    is_unified = sampler.drafter is not None and sampler.drafter.is_unified
    if not is_unified or draft_logits is None or sampler.use_block_verification:
        return positions
    return positions + VERIFY_SALT


def keeps_seeds(spec: "SpeculativeConfig") -> bool:
    """Whether requests with a seed get what the target samples alone."""
    if (drafter := spec.drafter) is None:
        return False
    is_greedy = spec.draft_sample_method == "greedy"
    return drafter.is_unified or (drafter.is_block and is_greedy)


def draw_seeded_alone(
    sampler: "RejectionSampler",
    logits: torch.Tensor,
    drafts: torch.Tensor,
    positions: torch.Tensor,
    cu_num_logits: torch.Tensor,
    states: torch.Tensor,
    states_np: np.ndarray,
    sampled: torch.Tensor,
    num_sampled: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sampled tokens; for requests with a seed, what the target samples alone.

    Args:
        logits, drafts, positions, cu_num_logits, states, states_np: as `draw_alone` and
            `follow_chains` take them.
        sampled: [requests, K + 1] int64.
        num_sampled: [requests] int32.
    """
    if not sampler.keeps_seeds:
        return sampled, num_sampled
    known = sampler.sampler.sampling_states
    # Not with synthetic or lossy acceptance, or if a watermark determines the sample.
    is_free = (
        sampler.synthetic_conditional_rates is None
        and sampler.watermark_key is None
        and not sampler.fly_window_size
    )
    if not is_free or not known.any_explicit_seed(states_np):
        return sampled, num_sampled
    # The same tokens; a search for them would be compiled for the first such request.
    if not known.temperature.np[states_np].any():
        return sampled, num_sampled
    drawn = draw_alone(sampler.sampler, logits, states, states_np, positions)
    most = sampler.num_speculative_steps
    tokens, count = follow_chains(drawn, drafts, cu_num_logits, most)
    seeded = async_tensor_h2d(known.seeds_set[states_np], device=positions.device)
    sampled = torch.where(seeded[:, None], tokens, sampled)
    return sampled, torch.where(seeded, count, num_sampled)


def excluded_drafts(
    sampler: "RejectionSampler",
    invalid: torch.Tensor | None,
    logits: torch.Tensor,
    draft_logits: torch.Tensor | None,
    input_batch: InputBatch,
) -> torch.Tensor | None:
    """Drafts not to verify.

    Args:
        invalid: [rows] bool, whether a grammar has invalidated the draft that led to a
            row; None if there is no grammar.
        logits: [rows, V], masked by grammars; those of a draft are in the row before.
        draft_logits: of probabilistic drafts; None for greedy ones.

    Returns:
        [rows] bool; None if all are verified.
    """
    # Synthetic acceptance might accept the first invalid one.
    is_synthetic = sampler.synthetic_conditional_rates is not None
    if draft_logits is not None and not is_synthetic:
        invalid = without_first_invalid(invalid, logits, input_batch)
    return with_past_context(sampler.drafter, invalid, input_batch)


def without_first_invalid(
    invalid: torch.Tensor | None, logits: torch.Tensor, input_batch: InputBatch
) -> torch.Tensor | None:
    """`invalid` without each request's first one if its probability is 0."""
    if invalid is None:
        return None
    drafts = input_batch.input_ids[input_batch.logits_indices].long()
    # -1 stands for no draft, and is never verified.
    found = logits[:-1].gather(1, drafts[1:, None].clamp(min=0))[:, 0]
    firsts = invalid[1:] & ~invalid[:-1] & (found == -torch.inf) & (drafts[1:] >= 0)
    return torch.cat([invalid[:1], invalid[1:] & ~firsts])


def with_past_context(
    drafter: "DrafterConfig | None",
    invalid: torch.Tensor | None,
    input_batch: InputBatch,
) -> torch.Tensor | None:
    """`invalid`, and the drafts past the drafter's context."""
    if drafter is None or not reaches_past(drafter.context, input_batch):
        return invalid
    positions = input_batch.positions[input_batch.logits_indices]
    past = (positions >= drafter.context) & (input_batch.expanded_local_pos > 0)
    return past if invalid is None else invalid | past


def reaches_past(context: int | None, input_batch: InputBatch) -> bool:
    """Whether a request of the batch may be past the drafter's context; None: it has
    no limit of its own."""
    if context is None:
        return False
    ends = input_batch.seq_lens_cpu_upper_bound[: input_batch.num_reqs].numpy()
    return bool(ends.max(initial=0) > context)


def without_opted_out(
    sampler: "Sampler", drafts: torch.Tensor, input_batch: InputBatch
) -> torch.Tensor:
    """Drafts, with -1 in place of those of requests that have turned drafting off.

    Args:
        sampler: knows by request state which requests have.
        drafts: [rows], the token that led to each row; negative is never accepted.
        input_batch: the batch of these rows.
    """
    refuses = sampler.refuses_drafts
    if not refuses[input_batch.idx_mapping_np].any():
        return drafts
    by_state = async_tensor_h2d(refuses, device=drafts.device)
    opted_out = by_state[input_batch.expanded_idx_mapping]
    return drafts.masked_fill(opted_out & (input_batch.expanded_local_pos > 0), -1)
