# SPDX-License-Identifier: Apache-2.0
"""How many of a step's drafts are verified: the scheduler's side of trimming.

Output keeps the target's distribution as long as whether a draft is verified does not
depend on that draft, nor on what draws or verifies it (a stopping rule, as that of
speculative sampling itself: arXiv 2211.17192; as a block, arXiv 2403.10444, where a
step back from each last draft proves as much). A request's survival falls from draft to
draft, and each chance is the drafter's of drafts *before* it. So a draft is among the
likeliest of its batch, or not, whatever it is and whatever follows it.

A tree is verified whole; whether a step is one of trees was settled when they were
drafted. Nor is a chain ranked by chances of drafts that were made before a tree: it is
trimmed where its own were told alone.

The budget must not tell either. Its chances are of earlier steps; but the noise that
drew a draft belongs to its position, and a later step draws there again. Of those
chances only such count as depend on text: of the drafts that were accepted, of the one
that was not, and of the one behind it, which depends on that one, whose position is
text by now. In place of the others stand averages of what was accepted, which go by
verified drafts and by the same chances.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from vllm.config.drafter.length import MIN_REQUESTS
from vllm.v1.spec_decode.dynamic.acceptance_by_kind import ALL_GREEDY
from vllm.v1.spec_decode.dynamic.budgets import Budgets
from vllm.v1.spec_decode.dynamic.draft_length import DraftLengths, Load
from vllm.v1.spec_decode.dynamic.step_times import Row

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import ModelRunnerOutput


# For so many steps what trimming gains is taken to be the same. It goes by the chances
# of one step, and to reckon it for every length takes a third of a millisecond of the
# host, which launches the next step behind it.
GAINS_HELD = 8


class Trimming:
    """Keeps what drafters said of their drafts, and chooses budgets by it.

    Args:
        lengths: what chooses how much is drafted.
        trimmed_times: see `Budgets`.

    Attributes:
        unverified: of the last output, by request whose verified drafts were all
            accepted, but not all of its drafts verified: chances of the next ones.
        is_trimmed: whether the step of the last output verified a part of its drafts.
    """

    def __init__(self, lengths: DraftLengths, trimmed_times: dict[int, Row]):
        depth = lengths.num_speculative_tokens
        self.budgets = Budgets(lengths.times, trimmed_times, depth, lengths.served)
        self._depth = depth
        self._acceptance = lengths.acceptance
        # By request, of the last output: chances of its drafts [K], and, if not all of
        # them were verified, how many.
        self._chances: dict[str, np.ndarray] = {}
        self._verified: dict[str, int] = {}
        self.unverified: dict[str, np.ndarray] = {}
        self.is_trimmed = False
        # Chances as above, of the last chains that were told of: while trees are
        # verified they say what trimming chains would gain.
        self._latest = np.empty((0, depth), dtype=np.float32)
        self._load: Load | None = None
        # What was reckoned last, of what load, and for how many steps more it holds.
        self._gains: dict[int, float] = {}
        self._gains_of: Load | None = None
        self._steps_held = 0
        # Requests of the last step, if chains of enough were drafted in it.
        self._told_of: set[str] = set()

    def take(self, step: "SchedulerOutput", output: "ModelRunnerOutput") -> None:
        """Takes in what workers tell of a step that has run.

        Drafts that were not verified leave vLLM's count of drafts by the way that those
        leave it which a grammar takes off.
        """
        drafts, told = step.scheduled_spec_decode_tokens, output.verified_drafts
        self._chances, self._verified, self.unverified = {}, {}, {}
        self.is_trimmed = step.verify_budget is not None
        if told is None:
            return
        counts = told[:, -1].astype(int).tolist()
        for name, count in zip(output.req_ids, counts, strict=True):
            if name in drafts:
                self._verified[name] = count
        self._take_chains(drafts, output)
        if self.is_trimmed:
            step.num_invalid_spec_tokens = {
                name: len(drafts[name]) - count
                for name, count in self._verified.items()
            }

    def _take_chains(
        self, drafts: dict[str, list[int]], output: "ModelRunnerOutput"
    ) -> None:
        own = [i for i, name in enumerate(output.req_ids) if name in drafts]
        if not own:
            return
        names = [output.req_ids[i] for i in own]
        told, verified = output.verified_drafts[own, :-1], [*self._verified.values()]
        tokens = np.array([len(output.sampled_token_ids[i]) for i in own])
        known = np.minimum(tokens + 1, [len(drafts[name]) for name in names])
        is_known = np.arange(self._depth) < known[:, None]
        self._latest = np.where(is_known, told, self._averages())
        self._chances = dict(zip(names, self._latest, strict=True))
        for i in np.flatnonzero((tokens > verified) & (known > verified)):
            self.unverified[names[i]] = told[i, verified[i] : known[i]]

    def num_verified(self, request_id: str, num_drafts: int) -> int:
        """Of the drafts that the step taken in last had scheduled for a request."""
        return min(num_drafts, self._verified.get(request_id, num_drafts))

    def gains(self, load: Load) -> dict[int, float]:
        """Throughput that trimming adds to each length of chains, as a share; to be
        asked once per step."""
        self._load, of = load, load._replace(context=0.0, age=0.0)
        self._steps_held -= 1
        if self._steps_held <= 0 or of != self._gains_of:
            self._gains, self._gains_of = self._reckon_gains(load), of
            self._steps_held = GAINS_HELD
        return self._gains

    def _reckon_gains(self, load: Load) -> dict[int, float]:
        lengths = self.budgets.times.seconds(load.num_reqs, load.context)
        if not self._may_trim() or len(lengths) == 1:
            return {}
        averages = [self._averages()] * load.num_reqs
        chances = np.concatenate([self._latest, averages])[: load.num_reqs]
        survival = chances.cumprod(axis=1)
        return {
            k: self.budgets.best(k, survival, load.context).gain
            for k in lengths
            if k <= self._depth
        }

    def _known(self, names: Iterable[str]) -> np.ndarray:
        """[requests, K], the averages for those of whom nothing is known."""
        average = self._averages()
        return np.stack([self._chances.get(name, average) for name in names])

    def _averages(self) -> np.ndarray:
        """[K], how often each position is accepted if those before it were, of the
        requests there are."""
        shares = ALL_GREEDY if self._load is None else self._load.shares
        return np.array(self._acceptance.rates(shares), dtype=np.float32)

    def _may_trim(self) -> bool:
        """Whether there are enough requests, all of them can use drafts, and none has
        a grammar."""
        load = self._load
        if load is None or load.num_reqs < MIN_REQUESTS or load.has_grammar:
            return False
        return load.num_drafting == load.num_reqs

    def budget(self, step: "SchedulerOutput") -> int | None:
        """Drafts to verify in a step; None: all that are scheduled.

        Only a step of decodes with chains of equally many drafts each is trimmed. A
        batch with a grammar is left alone, since the first draft that it takes off has
        to be verified; and so is one with drafts that were made in a small batch, of
        which no chances are told.

        To be asked for every step, in order.
        """
        names, told_of = set(step.num_scheduled_tokens), self._told_of
        drafts = step.scheduled_spec_decode_tokens
        is_told = step.num_spec_tokens_to_schedule <= self._depth
        is_told &= len(names) >= MIN_REQUESTS
        self._told_of = names if is_told else set()
        lengths = {len(drafts.get(name, ())) for name in names}
        if len(lengths) != 1 or not names <= told_of:
            return None
        num_drafts = lengths.pop()
        is_decode = set(step.num_scheduled_tokens.values()) == {num_drafts + 1}
        has_grammar = step.has_structured_output_requests
        if not is_decode or not num_drafts or has_grammar or not self._may_trim():
            return None
        survival = self._known(names).cumprod(axis=1)
        return self.budgets.best(num_drafts, survival, self._load.context).num_drafts
