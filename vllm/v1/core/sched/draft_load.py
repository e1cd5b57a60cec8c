# SPDX-License-Identifier: Apache-2.0
"""The scheduler's draft length, if the engine chooses it."""

from typing import TYPE_CHECKING
from zlib import crc32

from vllm.config.drafter.drafter import StepTimes
from vllm.config.drafter.length import (
    chosen_lengths,
    depth_of,
    is_auto,
    least_trimmed,
    trims,
)
from vllm.logger import init_logger
from vllm.v1.core.sched.step_intervals import Steady, StepIntervals
from vllm.v1.core.sched.trimming import Trimming
from vllm.v1.spec_decode.dynamic.acceptance import Verified
from vllm.v1.spec_decode.dynamic.acceptance_by_kind import NUM_KINDS, kind_of
from vllm.v1.spec_decode.dynamic.draft_length import DraftLengths, Load
from vllm.v1.spec_decode.opt_out import refuses_drafts

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.core.sched.step_drafts import VerifiedDraft
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.spec_decode.step_metrics import StepDrafting

logger = init_logger(__name__)

HELD = 4  # steps
# Acceptance is learned from about so many requests of a step: it is the same for the
# others of a large batch, and learning takes host time for each of them.
OBSERVED = 32


class ChosenLengths:
    """Replaces the scheduler's lookup from batch size to draft length.

    Data-parallel ranks in lockstep must draft equally many tokens: they draft what they
    agreed on last, see `vllm/v1/engine/agreed_drafts.py`.

    Attributes:
        lengths: chooses the draft length.
        agreed: drafts per request on all ranks in lockstep; None without such ranks.
        told: what this engine's workers draft while it is idle; None: the most.
        trimming: chooses how many drafts are verified; None: all.
    """

    def __init__(self, scheduler: "Scheduler", times: StepTimes):
        config = scheduler.vllm_config
        spec, parallel = config.speculative_config, config.parallel_config
        longest = spec.drafter.num_speculative_tokens
        trees = [n for n in chosen_lengths(spec) if spec.drafter.is_tree(n)]
        depths = {n: depth_of(spec, n) for n in trees}
        # For ranks that share nothing, the size is 1 by now.
        in_step = parallel.data_parallel_size > 1
        steps_held = parallel.dp_sync_interval if in_step else 1
        self.lengths = DraftLengths(longest, times.passes, depths, steps_held)
        self.agreed = longest if in_step else None
        self.told: int | None = None
        self._scheduler = scheduler
        self._limit = spec.drafter.limit(scheduler.max_model_len)
        self._load: Load | None = None
        # For which batch the last choice holds, and steps since it.
        self._chosen_for: tuple[int, str] | None = None
        self._elapsed = 0
        # With ranks in lockstep or pipeline stages, outputs do not time a single step.
        is_alone = not in_step and parallel.pipeline_parallel_size == 1
        self._intervals = StepIntervals() if is_alone else None
        self.trimming: Trimming | None = None
        if times.trimmed:
            least = least_trimmed(spec)
            self.trimming = Trimming(self.lengths, times.trimmed, least)
        elif times.trimmed is not None and trims(spec):
            logger.warning(
                "Every step verifies all its drafts: steps of %d requests or more, "
                "which enable_adaptive_verification needs, could not be timed at "
                "start. Raise max_num_seqs; on a CPU they take too long.",
                least_trimmed(spec),
            )

    @classmethod
    def of(cls, scheduler: "Scheduler") -> "ChosenLengths | None":
        """The lookup of a scheduler; None if the engine does not choose the length."""
        spec = scheduler.vllm_config.speculative_config
        return cls(scheduler, spec.step_times or StepTimes()) if is_auto(spec) else None

    def __getitem__(self, batch_size: int) -> int:
        """Drafts per request for a step; to be called once per step.

        A choice holds for up to `HELD` steps, until a request comes or goes: choosing
        takes host time, for which short steps have to wait.
        """
        running = self._scheduler.running
        of = (batch_size, running[-1].request_id) if running else None
        self._elapsed += 1
        if self._elapsed < HELD and of is not None and of == self._chosen_for:
            return self.lengths.choose_again()
        elapsed, self._elapsed = self._elapsed, 0
        self.lengths.end_steps(elapsed)
        self._load = load = self.load(batch_size)
        if self.agreed is not None:
            return self.agreed
        gains = {} if self.trimming is None else self.trimming.gains(load)
        chosen = self.lengths.choose(load, gains, elapsed)
        self._chosen_for = of if self.lengths.may_hold else None
        return chosen

    def observe(self, draft: "VerifiedDraft") -> None:
        """Records one request's verified draft."""
        request, unverified, name = draft.request, (), draft.request.request_id
        is_told = self.trimming is None or self.trimming.is_told
        if not is_told or not self._is_observed(name):
            self.lengths.acceptance.end_run(name)
            return
        is_trimmed = self.trimming is not None and self.trimming.is_trimmed
        if is_trimmed and not request.is_finished():
            unverified = self.trimming.unverified.get(name, ())
        elif not draft.num_tokens:
            return
        tree, num_accepted = draft.tree, draft.num_accepted
        numbers = tree.numbers if tree else range(1, num_accepted + 1)
        num_best = tree.num_best if tree else num_accepted
        num_before = request.num_output_tokens - draft.num_new_tokens
        self.lengths.observe(
            Verified(draft.num_tokens, numbers, num_best, unverified),
            kind=kind_of(request.sampling_params, num_before),
            request_id=name,
            is_trimmed=is_trimmed,
        )

    def _is_observed(self, request_id: str) -> bool:
        """Always the same requests of a batch: runs of accepted drafts are followed."""
        running = len(self._scheduler.running)
        if running <= OBSERVED:
            return True
        return crc32(request_id.encode()) % -(-running // OBSERVED) == 0

    def budget(self, step: "SchedulerOutput") -> int | None:
        """Drafts to verify in a step; None: all that are scheduled."""
        return None if self.trimming is None else self.trimming.budget(step)

    def take(self, step: "SchedulerOutput", output: "ModelRunnerOutput") -> None:
        """To be called for each step's output, before its drafts are observed."""
        ended = self._intervals and self._intervals.end(step)
        if ended and self._load:
            self._observe_seconds(*ended, step.verify_budget)
        if self.trimming is not None:
            self.trimming.take(step, output)

    def _observe_seconds(
        self, kind: Steady, seconds: float, budget: int | None
    ) -> None:
        of_step = kind.num_reqs, self._load.context, kind.num_drafts
        if budget is None:
            self.lengths.observe_seconds(*of_step, seconds)
        else:
            self.trimming.budgets.observe_seconds(*of_step, budget, seconds)

    def wish(self) -> tuple[int, int]:
        """Requests of this rank, and what it would draft for each; zeros if it ran
        nothing since the last call."""
        load, self._load = self._load, None
        return (0, 0) if load is None else (load.num_reqs, self.lengths.choose(load))

    def tell(self, step: "StepDrafting | None") -> None:
        """Adds what is expected of the chosen draft length to a step's stats."""
        if step is not None and (choice := self.lengths.choice) is not None:
            step.gain = self.lengths.gain.value
            if step.draft_length or not choice.num_drafts:  # else it left drafting out
                step.expected = choice.tokens, choice.seconds

    def load(self, batch_size: int) -> Load:
        """The load of the running requests, most of which are in the next step, too.

        Args:
            batch_size: requests of the present step.
        """
        running = len(self._scheduler.running)
        if not running:
            return Load(batch_size, batch_size, 0.0, age=0.0)
        context = age = 0
        has_grammar = False
        of_kind = [0] * NUM_KINDS
        for request in self._scheduler.running:
            known = request.num_tokens + request.num_output_placeholders
            context += known
            output = request.num_output_tokens
            age += output
            has_grammar |= request.use_structured_output
            params = request.sampling_params
            if known < self._limit and not refuses_drafts(params):
                of_kind[kind_of(params, output)] += 1
        drafting = sum(of_kind)
        # Scaled to the batch: some running requests may not be in it.
        num_drafting = max(1, drafting * batch_size // running)
        mean = context / running, has_grammar, age / running
        if not drafting:
            return Load(batch_size, 0, *mean)
        shares = tuple(count / drafting for count in of_kind)
        return Load(batch_size, num_drafting, *mean, shares)
