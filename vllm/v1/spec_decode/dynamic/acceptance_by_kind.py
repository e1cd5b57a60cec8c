# SPDX-License-Identifier: Apache-2.0
"""Estimates acceptance separately by kind of request.

A drafter drafts the tokens that the target is most likely to sample, and the higher the
temperature, the less often it samples them: the bundled PARD has 4.5 drafts accepted
per step on greedy text, 2.1 at temperature 0.5 and 0.9 at 0.8. And the first tokens of
an output are the hardest to predict: of four drafts of the bundled EAGLE-3 head, 0.7
are accepted within the first 16 tokens of greedy text, and 3.4 after 32. So estimates
from one kind of request do not fit others; a mixed batch uses the mean of its requests.
"""

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from itertools import accumulate, pairwise
from operator import mul
from random import Random
from typing import TYPE_CHECKING

from .acceptance import NO_TREES, ChainAcceptance, PlanAcceptance, Verified

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams

# Highest temperatures of the first two kinds; the third has all others. The next three
# are the same, of requests with fewer than `FIRST_TOKENS` of output. With more kinds
# each would learn more slowly, for little difference between them.
TEMPERATURES, FIRST_TOKENS = (0.0, 0.6), 16
NUM_KINDS = 2 * (len(TEMPERATURES) + 1)
MOST_RUNS = 4096
# A run of `LONGEST_RUN` tokens or more counts as `WHOLE_STEPS` shorter, a multiple of
# the tokens per step of most draft lengths.
LONGEST_RUN, WHOLE_STEPS = 96, 48
# Share of each kind among the requests that can use drafts: [NUM_KINDS], sum 1.
Shares = tuple[float, ...]
ALL_GREEDY: Shares = (1.0,) + (0.0,) * (NUM_KINDS - 1)
NONE_DRAFTS: Shares = (0.0,) * NUM_KINDS


def kind_of(params: "SamplingParams | None", num_output_tokens: int) -> int:
    """The kind of a request, from 0 to `NUM_KINDS` - 1."""
    kind = bisect_left(TEMPERATURES, params.temperature) if params else 0
    return kind if num_output_tokens >= FIRST_TOKENS else kind + NUM_KINDS // 2


class AcceptanceByKind:
    """A `PlanAcceptance` for each kind of request.

    Args:
        num_speculative_tokens: K, the longest chain.
        trees: nodes of the trees, and their depths.
    """

    def __init__(
        self, num_speculative_tokens: int, trees: Mapping[int, int] = NO_TREES
    ):
        self._of = [
            PlanAcceptance(num_speculative_tokens, trees) for _ in range(NUM_KINDS)
        ]
        self._runs: dict[str, int] = {}  # by request, tokens since a rejected draft
        self._random = Random(0)

    def _present(self, shares: Shares) -> Iterator[tuple[float, PlanAcceptance]]:
        pairs = zip(shares, self._of, strict=True)
        return ((share, of_kind) for share, of_kind in pairs if share)

    def chains(self, shares: Shares) -> Iterator[ChainAcceptance]:
        """The estimates of the kinds in a batch."""
        return (of_kind.chains for _, of_kind in self._present(shares))

    def observe(
        self,
        drafts: Verified,
        kind: int = 0,
        request_id: str = "",
        is_trimmed: bool = False,
    ) -> None:
        """Records a request's drafts.

        Args:
            is_trimmed: whether the step verified only part of its drafts; runs are not
                followed through such steps.
        """
        run, of_kind = self._runs.pop(request_id, 0), self._of[kind]
        if is_trimmed:
            of_kind.observe(drafts, None)
            return
        of_kind.observe(drafts, run)
        num_best, depth = drafts.num_best, of_kind.depth(drafts.num_drafts)
        if num_best == len(drafts.accepted) == depth > 0:
            # The bonus token was not compared with a draft. The run goes on as often as
            # one more draft would have been accepted.
            rate = of_kind.chains.rate_behind(num_best)
            if self._random.random() < rate:
                self._go_on(request_id, run + num_best + 1)

    def end_run(self, request_id: str) -> None:
        """To be called if a step of a request is not observed."""
        self._runs.pop(request_id, None)

    def _go_on(self, request_id: str, run: int) -> None:
        if len(self._runs) >= MOST_RUNS:  # mostly of requests that have ended
            self._runs.clear()
        self._runs[request_id] = run if run < LONGEST_RUN else run - WHOLE_STEPS

    def end_steps(self, shares: Shares, num_steps: int = 1) -> None:
        """Takes in the observations of `num_steps` steps. Those of kinds that were not
        in them do not fade."""
        for _, of_kind in self._present(shares):
            of_kind.end_steps(num_steps)

    def expected_tokens(self, shares: Shares = ALL_GREEDY) -> dict[int, float]:
        """Mean acceptance length (accepted drafts + 1) by plan."""
        found: dict[int, float] = {}
        for share, of_kind in self._present(shares):
            for plan, tokens in of_kind.expected_tokens().items():
                found[plan] = found.get(plan, 0.0) + share * tokens
        return found

    def rates(self, shares: Shares) -> list[float]:
        """[K], probability that a draft is accepted if those before it are."""
        survival = [
            [share * chance for chance in accumulate(of_kind.chains.rates(), mul)]
            for share, of_kind in self._present(shares)
        ]
        of_all = [1.0, *map(sum, zip(*survival, strict=True))]
        return [chance / before for before, chance in pairwise(of_all)]
