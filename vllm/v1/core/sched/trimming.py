# SPDX-License-Identifier: Apache-2.0
"""Chooses how many of a step's drafts are verified: the scheduler's side of trimming.

"Chances" are the acceptance probabilities that the drafter estimates for its drafts,
each given that those before it are accepted. "Survival" is their product up to a draft.
Trimming verifies the drafts of a batch with the largest survival, up to a budget.

**Which drafts.** Output keeps the target's distribution if whether a draft is verified
depends neither on that draft, nor on the noise that samples or verifies it. Then it is
a stopping rule, like that of speculative sampling itself (arXiv 2211.17192; for block
verification arXiv 2403.10444, where a step back from each last draft proves the same).
Trimming satisfies this: survival falls from draft to draft of a request, and a chance
depends only on the drafts *before* it. So whether a draft is among the most likely of
its batch depends neither on its own token nor on any draft after it.

**Trees** are verified whole; whether a step verifies trees was decided when they were
drafted. A chain is trimmed only if its own chances are known: it is never ranked by
those of drafts that were made before a tree.

**The budget** must not depend on them, either. It is computed from chances of earlier
steps; but the noise that samples a draft is keyed by its position, and a later step
samples there again with the same noise. So only those chances are used that depend on
final text: of the accepted drafts, of the first rejected one, and of the one after it.
(That one depends on the rejected draft, but text at the position of that draft is final
by now.) The others are replaced by mean acceptance rates, which are estimated from
verified drafts and the same chances.

**Steps with prompts** verify all drafts, so what a draft length yields depends on how
many steps have one: a long draft that is good if it is trimmed is expensive otherwise.

**Step times** that are measured at start can be wrong: other engines may have been
starting on the same device. If those of untrimmed steps are too long, every step is
trimmed, and no served one corrects them. So now and then a step that is worth trimming
verifies all its drafts, first of all at each batch size.

**The host's work** grows with the batch, and a trimmed step is short: it must not wait
for the scheduler. So chances are reported in one of `REPORTED_EVERY` steps, and a
budget holds until the next report.
"""

from collections.abc import Iterable, Set
from typing import TYPE_CHECKING

import numpy as np

from vllm.v1.spec_decode.dynamic.acceptance_by_kind import ALL_GREEDY
from vllm.v1.spec_decode.dynamic.budgets import ALL, Budget, Budgets
from vllm.v1.spec_decode.dynamic.draft_length import DraftLengths, Load
from vllm.v1.spec_decode.dynamic.served_times import size_of
from vllm.v1.spec_decode.dynamic.step_times import TrimmedTimes
from vllm.v1.spec_decode.dynamic.tries import TimingTries

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import ModelRunnerOutput


REPORTED_EVERY = 4
# Choices of a length for which the gains of trimming hold. Computing them for every
# length takes the host nearly a millisecond, before it launches the next step.
GAINS_HELD = 4
REMEMBERED = 48  # steps of which the share that could be trimmed is a running mean
# Share of all time that untrimmed steps may cost where trimmed ones are better, to be
# timed; at each batch size the first ones are due at once. Once they were timed, it is
# far less, since they are timed again only after some thousand steps.
UNTRIMMED_BUDGET = 0.005, float("inf")


class Trimming:
    """Keeps the chances that workers report, and chooses budgets by them.

    Args:
        lengths: chooses how much is drafted.
        trimmed_times: see `Budgets`.
        least: fewest requests of a batch to trim.

    Attributes:
        unverified: of the last output, for requests of which only part of the drafts
            were verified, and all of these accepted: chances of the drafts after them.
        is_trimmed: whether the step of the last output was trimmed.
        is_told: whether acceptance can be estimated from the last output: its step was
            not trimmed, or chances were reported.
    """

    def __init__(self, lengths: DraftLengths, trimmed_times: TrimmedTimes, least: int):
        depth = lengths.num_speculative_tokens
        self.budgets = Budgets(lengths.times, trimmed_times, lengths.served)
        self._untrimmed = TimingTries(lengths.served, *UNTRIMMED_BUDGET)
        self._depth, self._least = depth, least
        self._acceptance = lengths.acceptance
        # By request: chances of its drafts [K] in the last report, and how many drafts
        # were verified in the last output.
        self._chances: dict[str, np.ndarray] = {}
        self._verified: dict[str, int] = {}
        self.unverified: dict[str, list[float]] = {}
        self.is_trimmed, self.is_told = False, True
        # Chances as above, of the last chains that were reported: while trees are
        # verified, the gains of trimming chains are estimated from them.
        self._latest = np.empty((0, depth), dtype=np.float32)
        self._load: Load | None = None
        # The gains computed last, for which batches, and for how many more choices.
        self._gains: dict[int, float] = {}
        self._gains_of: tuple[int, bool] | None = None
        self._choices_held = 0
        # The budget computed last, and for how many requests with how many drafts.
        self._budget = ALL
        self._budget_of: tuple[int, int] | None = None
        self._steps_unreported = 0  # until the next report
        # Requests of the last step, if it drafted chains, and for enough of them that
        # workers know their chances.
        self._told_of: Set[str] = set()
        # Share of recent steps with chains whose drafts could be trimmed.
        self._share = 1.0

    def take(self, step: "SchedulerOutput", output: "ModelRunnerOutput") -> None:
        """Records what workers report of a finished step.

        Drafts that were not verified are left out of vLLM's counts of drafts in the
        same way as those that a grammar invalidated: `num_invalid_spec_tokens`.
        """
        self._verified, self.unverified = {}, {}
        self.is_trimmed = step.verify_budget is not None
        self.is_told = not self.is_trimmed or output.chances is not None
        drafts = step.scheduled_spec_decode_tokens
        if self.is_trimmed:
            tokens, rejected = output.sampled_token_ids, output.num_rejected.tolist()
            self._verified = {
                name: len(new) - 1 + count
                for name, new, count in zip(
                    output.req_ids, tokens, rejected, strict=True
                )
            }
            step.num_invalid_spec_tokens = {
                name: len(drafts[name]) - count
                for name, count in self._verified.items()
            }
        if output.chances is not None:
            self._take_chains(drafts, output)

    def _take_chains(
        self, drafts: dict[str, list[int]], output: "ModelRunnerOutput"
    ) -> None:
        own = [i for i, name in enumerate(output.req_ids) if name in drafts]
        if not own:
            return
        names = [output.req_ids[i] for i in own]
        told, lengths = output.chances[own], [len(drafts[name]) for name in names]
        tokens = np.array([len(output.sampled_token_ids[i]) for i in own])
        known = np.minimum(tokens + 1, lengths)
        is_known = np.arange(self._depth) < known[:, None]
        self._latest = np.where(is_known, told, self._averages())
        self._chances = dict(zip(names, self._latest, strict=True))
        self._budget_of = None
        if self.is_trimmed:
            verified = [self._verified[name] for name in names]
            for i in np.flatnonzero((tokens > verified) & (known > verified)):
                self.unverified[names[i]] = told[i, verified[i] : known[i]].tolist()

    def gains(self, load: Load) -> dict[int, float]:
        """Throughput that trimming adds to each length of chains, as a share, if as
        many steps can be trimmed as lately; to be called whenever a length is chosen.
        """
        self._load = load
        of = size_of(load.num_reqs), self._may_trim()
        self._choices_held -= 1
        if self._choices_held <= 0 or of != self._gains_of:
            self._gains, self._gains_of = self._reckon_gains(load), of
            self._choices_held = GAINS_HELD
        return self._gains

    def _reckon_gains(self, load: Load) -> dict[int, float]:
        lengths = self.budgets.times.seconds(load.num_reqs, load.context)
        if not self._may_trim() or len(lengths) == 1:
            return {}
        averages = [self._averages()] * load.num_reqs
        chances = np.concatenate([self._latest, averages])[: load.num_reqs]
        survival = chances.cumprod(axis=1)
        expected = self._acceptance.expected_tokens(load.shares)
        best, context = self.budgets.best, load.context
        return {
            k: best(k, survival, expected[k], context).mean_gain(self._share)
            for k in lengths
            if k <= self._depth
        }

    def _known(self, names: Iterable[str]) -> np.ndarray:
        """[requests, K], chances; averages for requests without any."""
        average = self._averages()
        return np.stack([self._chances.get(name, average) for name in names])

    def _averages(self) -> np.ndarray:
        """[K], acceptance rate of each position if those before it are accepted, for
        the kinds of requests that run."""
        shares = ALL_GREEDY if self._load is None else self._load.shares
        return np.array(self._acceptance.rates(shares), dtype=np.float32)

    def _may_trim(self) -> bool:
        """Whether there are enough requests, all can use drafts, and none has a
        grammar."""
        load = self._load
        if load is None or load.num_reqs < self._least or load.has_grammar:
            return False
        return load.num_drafting == load.num_reqs

    def budget(self, step: "SchedulerOutput") -> int | None:
        """Drafts to verify in a step; None: all that are scheduled.

        Only a decode step in which all requests have chains of the same length is
        trimmed. A batch with a grammar is not, since the first draft that the grammar
        invalidates has to be verified; nor is one with drafts that were made in a small
        batch, of which no chances are known.

        To be called for every step, in order.
        """
        names, told_of = step.num_scheduled_tokens.keys(), self._told_of
        drafts = step.scheduled_spec_decode_tokens
        is_large = len(names) >= self._least
        drafts_chains = step.num_spec_tokens_to_schedule <= self._depth
        self._told_of = names if is_large and drafts_chains else set()
        if not is_large or not drafts:
            return None
        step.reports_chances = self._is_report_due()
        num_drafts = max(map(len, drafts.values()))
        if num_drafts > self._depth:
            return None
        is_told = names <= told_of
        may_trim = is_told and self._may_trim() and self._is_uniform(step, num_drafts)
        self._share += (may_trim - self._share) / REMEMBERED
        if not may_trim:
            return None
        of = len(names), num_drafts
        if of != self._budget_of:
            self._budget, self._budget_of = self._best(names, num_drafts), of
        chosen, gain = self._budget
        if chosen is None or self._untrimmed.go_on(*of, gain):
            return None
        return chosen

    def _is_uniform(self, step: "SchedulerOutput", num_drafts: int) -> bool:
        """Whether all requests of a step have so many drafts, and none has a prompt
        or a grammar."""
        scheduled = step.num_scheduled_tokens.values()
        lengths = [*map(len, step.scheduled_spec_decode_tokens.values())]
        is_same = lengths.count(num_drafts) == len(scheduled)
        is_decode = set(scheduled) == {num_drafts + 1}
        has_grammar = step.has_structured_output_requests
        return is_same and is_decode and not has_grammar

    def _is_report_due(self) -> bool:
        self._steps_unreported -= 1
        if self._steps_unreported > 0:
            return False
        self._steps_unreported = REPORTED_EVERY
        return True

    def _best(self, names: Iterable[str], num_drafts: int) -> Budget:
        survival = self._known(names).cumprod(axis=1)
        shares, context = self._load.shares, self._load.context
        expected = self._acceptance.expected_tokens(shares)[num_drafts]
        return self.budgets.best(num_drafts, survival, expected, context)
