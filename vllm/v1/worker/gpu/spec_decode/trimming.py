# SPDX-License-Identifier: Apache-2.0
"""Verifies only the most likely drafts of a batch, if the scheduler gives a budget.

vLLM's adaptive verification is used only in steps that have a budget; all others run
the same kernels as without it. The scheduler chooses the budget together with how much
to draft; `v1/spec_decode/auto/verify.py` says why output keeps the target's
distribution.

One kernel ranks all drafts of a batch and writes the offsets of its requests. vLLM's
adaptive verification takes some fifteen PyTorch operations and two copies for this, one
after the other before the target runs, in every trimmed step. That also works for
requests with unlike numbers of drafts; here they have the same number.

Acceptance probabilities are estimated by vLLM's estimator (pull request #52228), fitted
sooner and more stable, and kept while an engine sleeps. They are known for chains that
were drafted in batches large enough to be trimmed. A tree has none: it is verified
whole, and the probabilities of its request's last chain are neither reported nor
learned from.
"""

from typing import TYPE_CHECKING

import numpy as np
import torch

from vllm.config.drafter.length import least_trimmed, log_all_verified, trims
from vllm.triton_utils import tl, triton
from vllm.v1.worker.gpu.attn_utils import (
    get_query_lens_mismatch_unsupported_backend,
    get_varlen_cudagraph_unsupported_backend,
)
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.spec_decode.acceptance_estimator import (
    OnlineAcceptanceEstimator,
)
from vllm.v1.worker.gpu.spec_decode.adaptive_verification import (
    AdaptiveVerificationManager,
)
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import get_max_chunk_logits
from vllm.v1.worker.gpu.spec_decode.verification import reaches_past

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner


# Requests of a step to learn from, as many as one program of the estimator takes: its
# kernel for more would be compiled while serving.
MOST_LEARNED = 256


class Trimming(AdaptiveVerificationManager):
    """Trims steps whose budget the scheduler chose.

    Args:
        runner: its batches are trimmed, by what its drafter estimates.
    """

    def __init__(self, runner: "GPUModelRunner"):
        super().__init__(
            runner.req_states,
            runner.input_buffers.query_start_loc,
            runner.model_state.num_new_sampled_tokens_per_step,
            max_total_logits=get_max_chunk_logits(runner.vocab_size),
        )
        self._sampler = runner.rejection_sampler
        self._estimator = runner.speculator.acceptance_estimator
        # [R, K] by request state, of the last chain that was drafted. vLLM's buffers
        # are wider: for it, a step has as many drafts as a tree has nodes.
        self._probs = self._estimator.predictions
        self.num_speculative_steps = self._probs.shape[1]
        # [R], whether they are of a request's latest drafts.
        self._is_known = np.zeros(len(self._probs), dtype=bool)
        self._step: SchedulerOutput | None = None
        self._refuses = runner.sampler.refuses_drafts
        spec = runner.vllm_config.speculative_config
        self._context, self._least = spec.drafter.context, least_trimmed(spec)

    def for_step(self, step: "SchedulerOutput") -> "Trimming | None":
        """The runner's manager in a step; None if all drafts are verified."""
        self._step, is_trimmed = step, step.verify_budget is not None
        # Without trimming, logits may be processed in more than one chunk.
        self._sampler.enable_adaptive_verification = is_trimmed
        return self if is_trimmed else None

    def get_num_tokens(
        self, num_tokens_per_req: dict[str, int], draft_tokens: dict[str, list[int]]
    ) -> int:
        """Rows of the trimmed batch, whose requests have equally many drafts."""
        num_reqs, num_others = len(num_tokens_per_req), self.num_bonus_tokens
        num_drafts = len(next(iter(draft_tokens.values())))
        room = self._max_total_logits - num_reqs * num_others
        budget = max(0, min(self._step.verify_budget, room, num_reqs * num_drafts))
        self._batch_budget = num_drafts, num_others, budget  # as vLLM's, for all alike
        return num_reqs * num_others + budget

    def reallocate_drafts(
        self, req_ids: list[str], idx_mapping: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, int, None]:
        (num_drafts, num_others, budget), self._batch_budget = self._batch_budget, None
        starts, logits = self.query_start_loc, self._cu_num_logits
        args = num_drafts, budget, starts, logits, num_others
        split_budget(self._probs, idx_mapping, *args)
        return logits[: len(req_ids) + 1], starts, budget, None

    def end_step(
        self,
        output: "ModelRunnerOutput",
        batch: InputBatch,
        num_sampled: torch.Tensor,
        num_rejected: torch.Tensor,
    ) -> None:
        """Adds what the scheduler needs to a step's output, and learns from the step.

        To be called before anything new is drafted, and before the copy of the output
        to the host begins: what is added are tensors, which are copied with it.
        """
        states, drafts = batch.idx_mapping_np, batch.num_draft_tokens_per_req
        step: SchedulerOutput = self._step
        is_large = batch.num_reqs >= self._least
        if step.verify_budget is not None:
            output.num_rejected = num_rejected
        reports = step.report_acceptance_probs and is_large and drafts is not None
        if reports and self._is_known[states[drafts > 0]].all():
            output.acceptance_probs = self._probs[batch.idx_mapping]
            # Of requests that cannot use drafts, nothing can be learned.
            if not (
                step.has_structured_output_requests
                or self._refuses[states].any()
                or reaches_past(self._context, batch)
            ):
                rows = batch.idx_mapping, num_sampled, num_rejected
                self._estimator.step(*(row[:MOST_LEARNED] for row in rows))
        # Of what is drafted next, for the same requests.
        is_chain = 0 < step.num_spec_tokens_to_schedule <= self.num_speculative_steps
        self._is_known[states] = is_large and is_chain

    def forget(self) -> None:
        """Forgets the probabilities of all requests, and what the estimator learned."""
        self._estimator.forget()
        self._is_known[:] = False

    def record_confidences(self, *args) -> None:
        """Nothing to keep on the host: `end_step` reports to the scheduler."""


def make_trimming(runner: "GPUModelRunner") -> Trimming | None:
    """The `Trimming` of a runner whose unified speculator estimates acceptance.

    None for others, and, with one log line, if attention does not support trimming and
    it was not enabled explicitly.

    Raises:
        ValueError: trimming was enabled explicitly, but attention needs the query
            lengths on the host, which does not know those of a trimmed batch, or has no
            CUDA graphs for them.
    """
    if runner.speculator is None or not runner.is_last_pp_rank:
        return None
    spec = runner.vllm_config.speculative_config
    if not trims(spec):
        return None
    backend = find_unsupported_attention(runner)
    if backend is None:
        speculator, depth = runner.speculator, spec.drafter.num_speculative_tokens
        # vLLM's has a column per tree node, but trees have no estimates.
        sizes = speculator.max_num_reqs, depth, speculator.device
        speculator.acceptance_estimator = QuickEstimator(*sizes)
        speculator.least_predicted = least_trimmed(spec)
        return Trimming(runner)
    if not spec.drafter.is_trimmed_by_default:
        raise ValueError(
            f"enable_adaptive_verification does not support {backend}: choose another "
            "attention backend, or unset enable_adaptive_verification."
        )
    log_all_verified(backend)
    spec.enable_adaptive_verification = False
    runner.rejection_sampler.enable_adaptive_verification = False
    runner.speculator.predict_nothing()
    return None


def find_unsupported_attention(runner: "GPUModelRunner") -> str | None:
    """A backend of the target's layers, or the drafter's, that cannot run a trimmed
    batch; None if all can."""
    depth = runner.vllm_config.speculative_config.drafter.num_speculative_tokens
    groups, drafts = runner.attn_groups, runner.speculator.draft_attn_layer_names
    backend = get_query_lens_mismatch_unsupported_backend(groups)
    has_graphs = runner.compilation_config.cudagraph_mode.has_full_cudagraphs()
    if backend is not None or not has_graphs:
        return backend
    names = (group.layer_names for each in groups for group in each)
    target = set().union(*names) - drafts
    found = get_varlen_cudagraph_unsupported_backend(
        groups, runner.vllm_config, depth + 1, checked_layer_names=target
    )
    return found and found[0]


FIRST_REFIT = 2  # reported steps; each refit doubles them
# Bounds of a refit's moves, and of the parameters, in logits: 6.0 is that of 0.9975.
LARGEST_MOVE, LARGEST_INTERCEPT, LARGEST_SLOPE = 1.5, 6.0, 3.0


class QuickEstimator(OnlineAcceptanceEstimator):
    """Refits after 2 steps, 4 more, 8 more, until it does so as often as vLLM's.

    Only steps count whose estimates are reported, see `v1/core/sched/draft_policy.py`.

    If only some drafts of a batch are verified, the estimates determine how many: with
    vLLM's initial guess too few are, if the drafter is right more often than its
    confidence says. A step of a large batch has some hundred drafts to learn from.

    A refit is one Newton step. If all drafts were accepted for a while, the curvature
    is almost zero: the first rejection then moved intercepts by hundreds of thousands.
    So moves are bounded, as in a trust region.
    """

    def __init__(self, *args):
        super().__init__(*args)
        self._first = self.slope.item(), self.intercepts[0].item()

    def step(self, *args) -> None:
        often = OnlineAcceptanceEstimator.REFIT_INTERVAL
        self.REFIT_INTERVAL = min(FIRST_REFIT << min(self._refits, 16), often)
        if self._steps_since_refit + 1 < self.REFIT_INTERVAL:
            super().step(*args)
            return
        known = [(value, value.clone()) for value in (self.slope, self.intercepts)]
        super().step(*args)
        for value, before in known:
            move = (value - before).clamp(-LARGEST_MOVE, LARGEST_MOVE)
            torch.add(before, move, out=value)
        self.slope.clamp_(0.0, LARGEST_SLOPE)
        self.intercepts.clamp_(-LARGEST_INTERCEPT, LARGEST_INTERCEPT)

    def forget(self) -> None:
        """Resets to the initial state, in place: CUDA graphs read these tensors."""
        slope, intercept = self._first
        self.slope.fill_(slope)
        self.intercepts.fill_(intercept)
        seen = self.info, self.grad, self.counts, self.features, self.predictions
        for tensor in seen:
            tensor.zero_()
        self._refits = self._steps_since_refit = 0


def outlast_weights(owner: object) -> None:
    """Allocates memory anew for an object's tensors, which remain the same tensors.

    Sleep of level 2 discards memory that was allocated while weights were loaded; when
    the engine wakes up it has any contents. What is allocated while the KV cache is
    initialized is kept, except for the cache itself. To be called then, before CUDA
    graphs are captured.
    """
    for tensor in vars(owner).values():
        if isinstance(tensor, torch.Tensor):
            tensor.data = tensor.clone()


# More than any probability, as bits of a float32.
ABOVE_ONE = tl.constexpr(0x3F800001)
# With a probability of 1 a draft would rank equal to the previous one, and which of the
# two is left out could depend on that one. The margin exceeds the rounding of products.
LARGEST_PROB = tl.constexpr(1 - 2**-16)


@triton.jit
def _least_verified(bits, budget):
    """The least of the `budget` largest, by bisection: floats from 0 on are ordered
    like their bits, and there are fewer than 2**30 up to 1."""
    least, above = 0, ABOVE_ONE
    for _ in range(30):
        middle = (least + above) // 2
        is_enough = tl.sum((bits >= middle).to(tl.int32), 0) >= budget
        least = tl.where(is_enough, middle, least)
        above = tl.where(is_enough, above, middle)
    return least


@triton.jit(do_not_specialize=["n", "num_drafts", "budget", "num_starts"])
def _split_budget_kernel(
    probs,  # [R, K] float32, by request state
    probs_stride,
    idx_mapping,  # [n] request states
    query_start_loc,  # [num_starts] int32
    cu_num_logits,  # [n + 1] int32
    n,
    num_drafts,
    budget,
    num_others,
    num_starts,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_STARTS: tl.constexpr,
):
    req, draft = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    is_req = req < n
    state = tl.load(idx_mapping + req, mask=is_req, other=0).to(tl.int64)

    is_draft = is_req[:, None] & (draft < num_drafts)[None, :]
    at = probs + state[:, None] * probs_stride + draft[None, :]
    prob = tl.load(at, mask=is_draft, other=0.0)
    reached = tl.cumprod(tl.minimum(prob, LARGEST_PROB), 1)
    bits = tl.where(is_draft, reached.to(tl.int32, bitcast=True), -1)

    # Products fall from draft to draft, so a request's drafts above a bound are its
    # first ones. Drafts at the bound follow, as many as fit, in the order of requests.
    least = _least_verified(tl.ravel(bits), budget)
    larger = tl.sum((bits > least).to(tl.int32), 1)
    equal = tl.sum((bits == least).to(tl.int32), 1)
    left = budget - tl.sum(larger, 0) - (tl.cumsum(equal, 0) - equal)
    verified = larger + tl.minimum(equal, tl.maximum(left, 0))

    ends = tl.cumsum(tl.where(is_req, verified + num_others, 0), 0)
    tl.store(cu_num_logits + 1 + req, ends, mask=is_req)
    tl.store(query_start_loc + 1 + req, ends, mask=is_req)
    tl.store(cu_num_logits, 0)
    tl.store(query_start_loc, 0)
    num_tokens, place = tl.max(ends, 0), tl.arange(0, BLOCK_STARTS)
    is_behind = (place > n) & (place < num_starts)
    tl.store(query_start_loc + place, num_tokens, mask=is_behind)


def split_budget(
    probs: torch.Tensor,
    idx_mapping: torch.Tensor,
    num_drafts: int,
    budget: int,
    query_start_loc: torch.Tensor,
    cu_num_logits: torch.Tensor,
    num_others: int = 1,
) -> None:
    """Writes the offsets of a batch of which only the most likely drafts are verified.

    Args:
        probs: [R, K] float32, how likely each draft is accepted if those before it
            are, by request state.
        idx_mapping: [n], request states.
        num_drafts: of each request; at most K.
        budget: drafts to verify, of all requests; at most all.
        query_start_loc: [most requests of a batch + 1] int32, written: where requests
            begin, and after them the number of tokens.
        cu_num_logits: [at least n + 1] int32, written: where their logits begin.
        num_others: tokens of each request that are not drafts; each has logits, too.
    """
    # Sized for the largest batch, so that nothing is compiled while serving.
    block_n = triton.next_power_of_2(len(query_start_loc) - 1)
    block_k = triton.next_power_of_2(probs.shape[1])
    _split_budget_kernel[(1,)](
        probs,
        probs.stride(0),
        idx_mapping,
        query_start_loc,
        cu_num_logits,
        len(idx_mapping),
        num_drafts,
        budget,
        num_others,
        len(query_start_loc),
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        BLOCK_STARTS=triton.next_power_of_2(len(query_start_loc)),
        num_warps=min(max(4, block_n * block_k // 1024), 16),
    )
