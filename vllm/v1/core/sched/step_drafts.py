# SPDX-License-Identifier: Apache-2.0
"""The drafts of a scheduler's steps: how many are made, and which of them count.

**Accepted** are draft tokens that a request receives. It may end within those that the
target accepts, at a stop token or `max_tokens`: the others are of no use, and count as
rejected. So accepted tokens + 1 are those that a request receives in a step.

**Verified** are less than the scheduled ones: equally many are scheduled for each
request, since FULL CUDA graphs need uniform query lengths. Placeholders do not count:

- of requests that have turned drafting off, or come from the waiting queue;
- at positions past the drafter's context;
- after the first draft that a grammar invalidates, and in the place of drafts that
  adaptive verification leaves out;
- nodes of a tree, if a chain is verified in its place.
"""

from math import inf
from typing import TYPE_CHECKING

from vllm.config.drafter import OWN_CHECKPOINTS
from vllm.config.drafter.length import depth_of
from vllm.logger import init_logger
from vllm.v1.core.sched.draft_policy import DraftPolicy
from vllm.v1.metrics.stats import RequestSpecDecodeMetrics
from vllm.v1.spec_decode.draft_trees import AcceptedNodes
from vllm.v1.spec_decode.opt_out import refuses_drafts
from vllm.v1.spec_decode.step_metrics import StepDrafting, observe_tree

if TYPE_CHECKING:
    from vllm.config import SpeculativeConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request
    from vllm.v1.spec_decode.metrics import SpecDecodingStats

logger = init_logger(__name__)

# Consecutive rejected drafts, one per request and step, before the warning. With a
# first token that is right once in fifty times, this happens by chance once in four
# hundred.
MAX_REJECTED = 300


class StepDrafts:
    """To be called for each step that is scheduled, and for each output, in order.

    Attributes:
        policy: chooses how much is drafted; None: the config says it.
    """

    def __init__(self, scheduler: "Scheduler"):
        self._scheduler = scheduler
        self.policy = DraftPolicy.of(scheduler)
        spec = scheduler.vllm_config.speculative_config
        self._rejected = RejectedDrafts(spec)
        # Without a drafter, drafts are a diffusion model's canvas.
        limit = scheduler.max_model_len
        self._limit = inf if spec is None else spec.drafter.limit(limit)
        self._step: SchedulerOutput | None = None
        self._output: ModelRunnerOutput | None = None
        self._num_sampled: list[int] = []
        self._from_queue: set[str] = set()

    def choose(self, step: "SchedulerOutput") -> None:
        """Sets how much a step drafts and verifies, once all else is scheduled."""
        if self.policy is not None:
            self.policy.choose(step)
        # Where workers leave drafting out, the usual draft length would give a wrong
        # time and wrong metrics. With data-parallel ranks only the workers know.
        parallel = self._scheduler.vllm_config.parallel_config
        if step.skip_drafts and parallel.data_parallel_size == 1:
            step.num_spec_tokens_to_schedule = 0

    def end_step(self, step: "SchedulerOutput", output: "ModelRunnerOutput") -> None:
        """To be called with each output, before its requests are observed."""
        self._step, self._output = step, output
        # Stop handling cuts these lists.
        self._num_sampled = [*map(len, output.sampled_token_ids)]
        # Whose scheduled drafts are placeholders; of diffusion, they are canvases.
        self._from_queue = set()
        has_drafts = bool(step.scheduled_spec_decode_tokens)
        if has_drafts and self._scheduler.num_sampled_tokens_per_step:
            new = {request.req_id for request in step.scheduled_new_reqs}
            self._from_queue = new | step.scheduled_cached_reqs.resumed_req_ids
        if self.policy is not None:
            self.policy.end_step(step, output)

    def observe(
        self, stats: "SpecDecodingStats | None", request: "Request", num_new_tokens: int
    ) -> "SpecDecodingStats | None":
        """Records a request for which drafts were scheduled.

        To be called once it is known whether it has ended, before it is freed.

        Args:
            stats: of other requests; None if there are none.
            num_new_tokens: tokens that the request received.

        Returns:
            The stats with this request; None if the scheduler makes none.
        """
        name, per_step = request.request_id, self._scheduler.num_sampled_tokens_per_step
        if name in self._from_queue or refuses_drafts(request.sampling_params):
            return stats
        index = self._output.req_id_to_index[name]
        sampled = self._num_sampled[index] if self._num_sampled else 0
        if sampled < per_step:
            return stats
        accepted, received = sampled - per_step, max(num_new_tokens - per_step, 0)
        tree = AcceptedNodes.of(self._output, index, received)
        num_before = request.num_tokens - num_new_tokens
        verified = self._num_verified(name, num_before, accepted, tree)
        if self.policy is not None:
            self.policy.observe(request, verified, received, tree)
        self._rejected.observe(verified, accepted)
        # A step that verifies part of its drafts counts even for a request without any.
        if not verified and self._step.verify_budget is None:
            return stats
        return self._count(stats, request, verified, received, tree)

    def _num_verified(
        self, name: str, num_before: int, num_accepted: int, tree: AcceptedNodes | None
    ) -> int:
        """Verified draft tokens of a request that had `num_before` tokens."""
        number = len(self._step.scheduled_spec_decode_tokens[name])
        valid = number - (self._step.num_invalid_spec_tokens or {}).get(name, 0)
        room, is_chain = self._limit - num_before, tree is not None and tree.is_chain
        if room >= number and not is_chain:
            return valid
        # A tree that was cut may be deeper than others of as many nodes.
        spec = self._scheduler.vllm_config.speculative_config
        depth = max(depth_of(spec, number), num_accepted)
        if room >= depth and not is_chain:
            return valid
        return max(min(valid, depth, room), 0)

    def _count(
        self,
        stats: "SpecDecodingStats | None",
        request: "Request",
        verified: int,
        received: int,
        tree: AcceptedNodes | None,
    ) -> "SpecDecodingStats | None":
        scheduler, name = self._scheduler, request.request_id
        if request.spec_decode_metrics is not None:
            is_detailed = scheduler.spec_decode_metrics_level == "detailed"
            request.spec_decode_metrics.observe(verified, received, is_detailed)
        scheduled = len(self._step.scheduled_spec_decode_tokens[name])
        counts = scheduled, received, {name: scheduled - verified}
        stats = scheduler.make_spec_decoding_stats(stats, *counts, name)
        if stats is not None:
            spec = scheduler.vllm_config.speculative_config
            observe_tree(stats, verified, tree, spec)
        return stats

    def stats(self) -> StepDrafting | None:
        """How the step of the last output drafted; None if it ran nothing, or there is
        no drafter."""
        step, spec = self._step, self._scheduler.vllm_config.speculative_config
        if spec is None or not step.total_num_scheduled_tokens:
            return None
        length = step.num_spec_tokens_to_schedule
        how = spec.method, spec.drafter.mode, length, self._output.step_seconds
        gain = self.policy and self.policy.gain
        return StepDrafting(*how, gain, is_tree=spec.drafter.is_tree(length))


class RejectedDrafts:
    """Warns once if no draft is ever accepted, as of a drafter for another target; not
    without a drafter, nor with one that cannot be a wrong one."""

    def __init__(self, spec: "SpeculativeConfig | None"):
        self._spec, self._in_a_row = spec, 0
        is_fitted = spec is not None and spec.method in OWN_CHECKPOINTS
        self._may_warn = is_fitted and spec.rejection_sample_method != "synthetic"

    def observe(self, num_tokens: int, num_accepted: int) -> None:
        """Records the verified draft of one request.

        Args:
            num_accepted: by the target, whether or not the request received them.
        """
        if num_accepted:
            self._in_a_row = 0
        elif num_tokens and self._may_warn:
            self._in_a_row += 1
            if self._in_a_row == MAX_REJECTED:
                self._may_warn = False
                logger.warning(
                    "None of the last %d drafts by %s was accepted, so speculation "
                    "only adds latency. Check that it was trained for this very "
                    "target, with its tokenizer and from these weights, and that the "
                    'line "Drafter …" at start-up is what its authors say; or leave '
                    "speculative_config unset.",
                    MAX_REJECTED,
                    self._spec.model,
                )


def request_metrics(scheduler: "Scheduler") -> RequestSpecDecodeMetrics:
    """Metrics of a new request, by how many of its drafts are accepted: 0 to K.

    The scheduler's `num_spec_tokens` are the nodes of a tree, of which K are accepted
    at most.
    """
    spec, most = scheduler.vllm_config.speculative_config, scheduler.num_spec_tokens
    return RequestSpecDecodeMetrics.new(
        most if spec is None else spec.drafter.num_speculative_tokens
    )
