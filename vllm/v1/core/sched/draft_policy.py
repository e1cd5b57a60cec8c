# SPDX-License-Identifier: Apache-2.0
"""The scheduler's side of "auto": how much each step drafts, and verifies.

`vllm/v1/spec_decode/auto/` chooses, and learns; this file tells it what runs.
"""

import time
from collections.abc import Hashable, Set
from typing import TYPE_CHECKING

import numpy as np

from vllm.config.drafter import StepTimes
from vllm.config.drafter.length import (
    chosen_lengths,
    depth_of,
    is_auto,
    least_trimmed,
    trims,
)
from vllm.logger import init_logger
from vllm.v1.spec_decode.auto.acceptance import NUM_KINDS, Verified, kind_of
from vllm.v1.spec_decode.auto.chooser import Chooser, Load
from vllm.v1.spec_decode.auto.verify import PartialSteps
from vllm.v1.spec_decode.graph_sizes import graph_rows
from vllm.v1.spec_decode.opt_out import refuses_drafts

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request
    from vllm.v1.spec_decode.draft_trees import AcceptedNodes

logger = init_logger(__name__)

# Steps for which a choice holds, until a request comes or goes: choosing takes host
# time, for which short steps have to wait. Halved, it takes twice that time; halved or
# doubled, the replay changes by less than 0.2 %.
HELD = 4
# Acceptance is learned from about so many requests of a step: it is the same for the
# others of a large batch, and learning takes host time for each of them. Halved or
# doubled, the replay changes by 0.1 %.
OBSERVED = 32
# Acceptance probabilities are reported in one of so many steps: computing with them
# takes host time. Halved, the replay gains 0.2 %, for twice that time.
REPORTED_EVERY = 4


class DraftPolicy:
    """Chooses how much is drafted and verified in each step of a scheduler.

    Data-parallel ranks in lockstep must draft equally many tokens: they draft what they
    agreed on last, see `vllm/v1/engine/agreed_drafts.py`.

    Attributes:
        chooser: chooses and learns.
        agreed: drafts per request on all ranks in lockstep; None without such ranks.
        idle_drafts: what this engine's workers draft while it is idle; None: the most.
    """

    def __init__(self, scheduler: "Scheduler", times: StepTimes):
        config = scheduler.vllm_config
        spec, parallel = config.speculative_config, config.parallel_config
        longest, least = spec.drafter.num_speculative_tokens, least_trimmed(spec)
        # For ranks that share nothing, the size is 1 by now.
        in_step = parallel.data_parallel_size > 1
        self._interval = parallel.dp_sync_interval if in_step else 1  # of choices
        self.agreed = longest if in_step else None
        self.idle_drafts: int | None = None
        partial = None
        if times.trimmed:
            partial = PartialSteps(times.trimmed, least, graph_rows)
        lengths = chosen_lengths(spec)
        depths = {n: depth_of(spec, n) for n in lengths if spec.drafter.is_tree(n)}
        self.chooser = Chooser(longest, times.passes, depths, partial, self._interval)
        self._partial = PartialVerification(self.chooser)
        if partial is None and times.trimmed is not None and trims(spec):
            logger.warning(
                "Every step verifies all its drafts: steps of %d requests or more, "
                "which enable_adaptive_verification needs, could not be timed at "
                "start. Raise max_num_seqs; on a CPU they take too long.",
                least,
            )
        self._scheduler = scheduler
        self._limit = spec.drafter.limit(scheduler.max_model_len)
        self._load: Load | None = None
        self._chosen_for: Hashable = None  # the batch of the last choice
        self._elapsed = self._seen = 0  # steps since then; verified drafts
        # With ranks in lockstep or pipeline stages, outputs do not time a single step.
        self._is_timed = not in_step and parallel.pipeline_parallel_size == 1
        self._last: tuple[Hashable, float] = None, 0.0  # output: kind of step, time

    @classmethod
    def of(cls, scheduler: "Scheduler") -> "DraftPolicy | None":
        """The policy of a scheduler; None if the engine does not choose the length."""
        spec = scheduler.vllm_config.speculative_config
        return cls(scheduler, spec.step_times or StepTimes()) if is_auto(spec) else None

    def choose(self, step: "SchedulerOutput") -> None:
        """Sets how much a step drafts, and how many drafts it verifies.

        To be called for every step, in order.
        """
        if not (num_reqs := len(step.num_scheduled_tokens)):
            return
        step.num_spec_tokens_to_schedule = self._num_drafts(num_reqs)
        if (load := self._load) is not None and self.chooser.verifier is not None:
            # The load may be that of an earlier step.
            running = self._scheduler.running
            has_grammar = any(request.use_structured_output for request in running)
            self._partial.choose(step, load._replace(has_grammar=has_grammar))

    def _num_drafts(self, num_reqs: int) -> int:
        running = self._scheduler.running
        batch = (num_reqs, running[-1].request_id) if running else None
        self._elapsed += 1
        if self.agreed is not None:
            self._load = self.load(num_reqs)
            return self.agreed
        plan, is_same = self.chooser.plan, batch == self._chosen_for
        if plan is not None and batch and is_same and self._elapsed < HELD:
            return plan
        elapsed, self._elapsed = self._elapsed, 0
        self._load = self.load(num_reqs)
        chosen = self.chooser.choose(self._load, elapsed)
        self._chosen_for = batch if self.chooser.trial is None else None
        return chosen

    def proposed_length(self) -> tuple[int, int]:
        """Requests of this rank, and what it would draft for each until the next call;
        zeros if it ran nothing since the last one."""
        load, self._load = self._load, None
        if load is None:
            return 0, 0
        return load.num_reqs, self.chooser.choose(load, self._interval)

    def observe(
        self,
        request: "Request",
        num_tokens: int,
        num_accepted: int,
        tree: "AcceptedNodes | None" = None,
    ) -> None:
        """Records the verified draft of a request, which has the step's tokens.

        Args:
            num_tokens: draft tokens that were verified; of a tree, nodes.
            num_accepted: those of them that it received.
            tree: accepted nodes; None: a chain.
        """
        unverified, self._seen = self._partial.unverified, self._seen + 1
        one_of = max(1, -(-len(self._scheduler.running) // OBSERVED))
        if unverified is None or self._seen % one_of:
            return
        more = () if request.is_finished() else unverified.get(request.request_id, ())
        if not (num_tokens or more):
            return
        accepted, num_best = range(1, num_accepted + 1), num_accepted
        if tree is not None:
            accepted, num_best = tree.numbers, tree.num_best
        drafts = Verified(num_tokens, accepted, num_best, more)
        self.chooser.observe(drafts, _kind_of(request.sampling_params))

    def end_step(self, step: "SchedulerOutput", output: "ModelRunnerOutput") -> None:
        """To be called for each step's output, before its drafts are observed."""
        (last, ended), kind = self._last, _kind_of_step(step)
        self._last = kind, time.perf_counter()
        # Equal decode steps run back to back, with or without async scheduling, so this
        # is the time of one, with all of the host's work.
        if self._is_timed and self._load is not None and kind and kind == last:
            self.chooser.observe_seconds(
                len(step.num_scheduled_tokens),
                self._load.context,
                step.num_spec_tokens_to_schedule,
                self._last[1] - ended,
                step.verify_budget,
            )
        self._partial.end_step(step, output)

    @property
    def gain(self) -> float | None:
        """Expected throughput of recent steps over that without drafts, if known."""
        return self.chooser.gain.mean if self.chooser.gain.weight else None

    def load(self, batch_size: int) -> Load:
        """The load of the running requests, most of which are in the next step, too.

        Args:
            batch_size: requests of the present step.
        """
        running = self._scheduler.running
        if not running:
            return Load(batch_size, batch_size, 0.0)
        context, has_grammar, of_kind = 0, False, [0] * NUM_KINDS
        for request in running:
            known = request.num_tokens + request.num_output_placeholders
            context += known
            has_grammar |= request.use_structured_output
            params = request.sampling_params
            if known < self._limit and not refuses_drafts(params):
                of_kind[_kind_of(params)] += 1
        load = Load(batch_size, 0, context / len(running), has_grammar)
        if not (drafting := sum(of_kind)):
            return load
        # Scaled to the batch: some running requests may not be in it.
        num_drafting = max(1, drafting * batch_size // len(running))
        shares = tuple(count / drafting for count in of_kind)
        return load._replace(num_drafting=num_drafting, shares=shares)


def _kind_of(params: "SamplingParams | None") -> int:
    return kind_of(params.temperature if params else 0.0)


def _kind_of_step(step: "SchedulerOutput") -> Hashable:
    """What steps of equal times have in common; None for those with prompts, or that
    draft another number than they verify."""
    num_reqs, drafts = len(step.num_scheduled_tokens), step.num_spec_tokens_to_schedule
    is_steady = step.total_num_scheduled_tokens == num_reqs * (drafts + 1)
    if not num_reqs or not is_steady or step.scheduled_new_reqs:
        return None
    return num_reqs, drafts, step.verify_budget is not None


class PartialVerification:
    """Which steps verify only part of their drafts, and what workers report of them.

    Only a decode step in which all requests have chains of the same length is trimmed.
    A batch with a grammar is not, since the first draft that the grammar invalidates
    has to be verified; nor is one with drafts that were made in a small batch, of which
    no probabilities are known.

    Attributes:
        unverified: of the last output, for requests of which only part of the drafts
            were verified, and all of these accepted: acceptance probabilities of the
            drafts after them. None: acceptance cannot be estimated, since the step was
            trimmed, and no probabilities were reported.
    """

    def __init__(self, chooser: Chooser):
        self._chooser = chooser
        self.unverified: dict[str, tuple[float, ...]] | None = {}
        self._num_large = 0  # steps of large batches
        # Requests of the last step, if it drafted chains, and for enough of them that
        # workers know their probabilities.
        self._known: Set[str] = set()

    def choose(self, step: "SchedulerOutput", load: Load) -> None:
        """Sets how many drafts a step verifies, and whether workers report."""
        verifier = self._chooser.verifier
        names, known = step.num_scheduled_tokens.keys(), self._known
        is_large, depth = len(names) >= verifier.least, verifier.depth
        drafts_chains = step.num_spec_tokens_to_schedule <= depth
        self._known = names if is_large and drafts_chains else set()
        drafts = step.scheduled_spec_decode_tokens
        if not is_large or not drafts:
            return
        self._num_large += 1
        step.report_acceptance_probs = self._num_large % REPORTED_EVERY == 0
        num_drafts = max(map(len, drafts.values()))
        if num_drafts > depth:
            return
        is_trimmable = names <= known and _is_uniform(step, num_drafts)
        is_trimmable &= verifier.may_trim(load)
        verifier.count(is_trimmable)
        if is_trimmable:
            step.verify_budget = verifier.best(len(names), num_drafts, load).num_drafts

    def end_step(self, step: "SchedulerOutput", output: "ModelRunnerOutput") -> None:
        """Records what workers report of a finished step.

        Drafts that were not verified are left out of vLLM's counts of drafts in the
        same way as those that a grammar invalidated: `num_invalid_spec_tokens`.
        """
        is_partial = step.verify_budget is not None
        is_reported = output.acceptance_probs is not None
        self.unverified = {} if is_reported or not is_partial else None
        if not (is_partial or is_reported):
            return
        drafts, names = step.scheduled_spec_decode_tokens, output.req_ids
        tokens = np.array([*map(len, output.sampled_token_ids)])
        lengths = np.array([len(drafts.get(name, ())) for name in names])
        verified = lengths
        if is_partial:
            verified = tokens - 1 + output.num_rejected
            unverified = (lengths - verified).tolist()
            step.num_invalid_spec_tokens = dict(zip(names, unverified, strict=True))
        if not is_reported or not lengths.any():
            return
        probs, has = output.acceptance_probs, lengths > 0
        if self._chooser.verifier is not None:
            self._chooser.verifier.report(probs[has], tokens[has], lengths[has])
        # Only of text that is final, see `auto/verify.py`.
        known = np.minimum(tokens + 1, lengths)
        for i in np.flatnonzero((tokens > verified) & (known > verified)):
            more = probs[i, verified[i] : known[i]]
            self.unverified[names[i]] = tuple(more.tolist())


def _is_uniform(step: "SchedulerOutput", num_drafts: int) -> bool:
    """Whether all requests of a step have so many drafts, and none has a prompt."""
    scheduled = step.num_scheduled_tokens.values()
    lengths = [*map(len, step.scheduled_spec_decode_tokens.values())]
    is_same = lengths.count(num_drafts) == len(scheduled)
    return is_same and set(scheduled) == {num_drafts + 1}
