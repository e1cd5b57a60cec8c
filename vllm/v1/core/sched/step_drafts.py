# SPDX-License-Identifier: Apache-2.0
"""Counts the verified drafts of a finished step, and has "auto" learn from them.

**Accepted** are draft tokens that a request receives. It may end within those that the
target accepts, at a stop token or `max_tokens`: the others are of no use, and count as
rejected. So accepted tokens + 1 are those that a request receives in a step.

**Verified** are less than the scheduled ones: equally many are scheduled for each
request, since FULL CUDA graphs need uniform query lengths. Placeholders do not count:

- of requests that have turned drafting off, or come from the waiting queue;
- at positions past the drafter's context;
- after the first draft that a grammar invalidates, and in the place of drafts that
  trimming leaves out;
- nodes of a tree, if a chain is verified in its place.
"""

from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from vllm.config.drafter.length import depth_of
from vllm.v1.metrics.stats import RequestSpecDecodeMetrics
from vllm.v1.spec_decode.accepted_nodes import AcceptedNodes
from vllm.v1.spec_decode.opt_out import refuses_drafts
from vllm.v1.spec_decode.step_metrics import observe_tree, step_drafting

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request
    from vllm.v1.spec_decode.metrics import SpecDecodingStats
    from vllm.v1.spec_decode.step_metrics import StepDrafting


class VerifiedDraft(NamedTuple):
    """What one request drafted for a step.

    Attributes:
        request: with the step's tokens.
        num_new_tokens: tokens that it received in the step.
        num_tokens: draft tokens that were verified; of a tree, nodes.
        num_accepted: those of them that it received.
        tree: accepted nodes; None: a chain.
    """

    request: "Request"
    num_new_tokens: int
    num_tokens: int
    num_accepted: int
    tree: AcceptedNodes | None = None


class StepDrafts:
    """The drafts of a finished step; to be made for each step's output, in order."""

    def __init__(
        self,
        scheduler: "Scheduler",
        step: "SchedulerOutput",
        output: "ModelRunnerOutput",
    ):
        self._scheduler, self._step, self._output = scheduler, step, output
        # Stop handling cuts these lists.
        self._num_sampled = [*map(len, output.sampled_token_ids)]
        if scheduler.draft_lengths is not None:
            scheduler.draft_lengths.take(step, output)

    @cached_property
    def _from_queue(self) -> set[str]:
        """Requests whose scheduled drafts are placeholders; of diffusion, canvases."""
        if not self._scheduler.num_sampled_tokens_per_step:
            return set()
        new = {request.req_id for request in self._step.scheduled_new_reqs}
        return new | self._step.scheduled_cached_reqs.resumed_req_ids

    def observe(
        self,
        stats: "SpecDecodingStats | None",
        request: "Request",
        num_new_tokens: int,
    ) -> "SpecDecodingStats | None":
        """Records a request for which drafts were scheduled.

        To be called once it is known whether it has ended, before it is freed.

        Args:
            stats: of other requests; None if there are none.
            num_new_tokens: tokens that the request received.

        Returns:
            The stats with this request; None if the scheduler makes none.
        """
        scheduler, name = self._scheduler, request.request_id
        if name in self._from_queue or refuses_drafts(request.sampling_params):
            return stats
        index = self._output.req_id_to_index[name]
        per_step = scheduler.num_sampled_tokens_per_step
        sampled = self._num_sampled[index] if self._num_sampled else 0
        if sampled < per_step:
            return stats
        accepted, received = sampled - per_step, max(num_new_tokens - per_step, 0)
        tree = AcceptedNodes.of(self._output, index, received)
        num_before = request.num_tokens - num_new_tokens
        verified = self._num_verified(name, num_before, accepted, tree)
        draft = VerifiedDraft(request, num_new_tokens, verified, received, tree)
        if scheduler.draft_lengths is not None:
            scheduler.draft_lengths.observe(draft)
        watch = scheduler.unaccepted_drafts
        if watch is not None and verified and not watch.observe(verified, accepted):
            scheduler.unaccepted_drafts = None
        # Trimming verifies the drafts of a step, if none of some requests.
        is_counted = verified or self._step.verify_budget is not None
        return self._count(stats, draft) if is_counted else stats

    def _num_verified(
        self, name: str, num_before: int, num_accepted: int, tree: AcceptedNodes | None
    ) -> int:
        """Verified draft tokens of a request that had `num_before` tokens."""
        number = len(self._step.scheduled_spec_decode_tokens[name])
        valid = number - (self._step.num_invalid_spec_tokens or {}).get(name, 0)
        spec = self._scheduler.vllm_config.speculative_config
        if spec is None:  # a diffusion model's canvas
            return valid
        # A tree that was cut may be deeper than others of as many nodes.
        depth = max(depth_of(spec, number), num_accepted)
        room = spec.drafter.limit(self._scheduler.max_model_len) - num_before
        if room < depth or (tree is not None and tree.is_chain):
            return max(min(valid, depth, room), 0)
        return valid

    def _count(
        self, stats: "SpecDecodingStats | None", draft: VerifiedDraft
    ) -> "SpecDecodingStats | None":
        scheduler, request = self._scheduler, draft.request
        name, verified = request.request_id, draft.num_tokens
        if request.spec_decode_metrics is not None:
            is_detailed = scheduler.spec_decode_metrics_level == "detailed"
            counts = verified, draft.num_accepted
            request.spec_decode_metrics.observe(*counts, is_detailed)
        scheduled = len(self._step.scheduled_spec_decode_tokens[name])
        counts = scheduled, draft.num_accepted, {name: scheduled - verified}
        stats = scheduler.make_spec_decoding_stats(stats, *counts, name)
        if stats is not None:
            spec = scheduler.vllm_config.speculative_config
            observe_tree(stats, verified, draft.tree, spec)
        return stats

    def stats(self) -> "StepDrafting | None":
        """How the step drafted; None if it ran nothing, or there is no drafter."""
        scheduler = self._scheduler
        found = step_drafting(scheduler.vllm_config, self._step, self._output)
        if scheduler.draft_lengths is not None:
            scheduler.draft_lengths.tell(found)
        return found


def request_metrics(scheduler: "Scheduler") -> RequestSpecDecodeMetrics:
    """Metrics of a new request, by how many of its drafts are accepted: 0 to K.

    The scheduler's `num_spec_tokens` are the nodes of a tree, of which K are accepted
    at most.
    """
    spec = scheduler.vllm_config.speculative_config
    most = scheduler.num_spec_tokens
    if spec is not None:
        most = spec.drafter.num_speculative_tokens
    return RequestSpecDecodeMetrics.new(most)
