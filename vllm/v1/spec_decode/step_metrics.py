# SPDX-License-Identifier: Apache-2.0
"""Metrics of drafting besides accepted tokens: mode, draft length, time.

`docs/observability.md` lists the metrics.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import nan
from typing import TYPE_CHECKING, Any

import numpy as np

from vllm.config.drafter import num_candidates
from vllm.config.drafter.length import depth_of, is_auto
from vllm.v1.spec_decode.auto.acceptance import Faded

if TYPE_CHECKING:
    from vllm.config import SpeculativeConfig
    from vllm.v1.metrics.stats import SchedulerStats
    from vllm.v1.spec_decode.draft_trees import AcceptedNodes
    from vllm.v1.spec_decode.metrics import SpecDecodingStats

PREFIX = "vllm:spec_decode_"
# Counters whose values are not integers.
IN_PARTS = ("target_seconds", "draft_seconds")
# A draft counts half in the acceptance length after so many others. Not tuned: it sets
# how smooth a gauge is.
RECENT_DRAFTS = 4096


@dataclass
class StepDrafting:
    """How one step drafted; sent from the scheduler to the front end.

    Attributes:
        method: of the speculative config.
        mode: see `DrafterConfig.mode`.
        draft_length: tokens that each request was to draft in the step; for a tree, its
            nodes.
        seconds: of the target and of drafting in a timed step, on most devices an
            earlier one; None in most steps.
        gain: expected throughput of recent steps relative to no drafts; None if it is
            not known.
        is_tree: whether each request was to draft a tree.
    """

    method: str
    mode: str
    draft_length: int
    seconds: tuple[float, float] | None = None
    gain: float | None = None
    is_tree: bool = False


@dataclass
class VerifiedTrees:
    """Verified trees of one step.

    Attributes:
        num_nodes: nodes that were verified.
        accepted_by_rank: accepted nodes by the rank of their tokens, 0 for the best.
    """

    num_nodes: int
    accepted_by_rank: dict[int, int]


def observe_tree(
    stats: "SpecDecodingStats",
    num_nodes: int,
    accepted: "AcceptedNodes | None",
    spec: "SpeculativeConfig",
) -> None:
    """Adds a verified tree to a step's stats, which already count it as a draft.

    Positions are depths, however many nodes a tree has.
    """
    if accepted is None or num_nodes <= accepted.max_depth:
        return
    # A tree that was cut may be deeper than others of as many nodes.
    depth = max(depth_of(spec, num_nodes), len(accepted.ranks))
    for node in range(depth, num_nodes):
        stats.num_draft_tokens_per_pos[node] -= 1
    if stats.trees is None:
        stats.trees = VerifiedTrees(0, {})
    stats.trees.num_nodes += num_nodes
    by_rank = stats.trees.accepted_by_rank
    for rank in accepted.ranks:
        by_rank[rank] = by_rank.get(rank, 0) + 1


class StepSummary:
    """Sums over the steps of one logging interval."""

    def __init__(self) -> None:
        self.last: StepDrafting | None = None
        # By (whether they drafted trees, draft length).
        self.steps_by_length: Counter[tuple[bool, int]] = Counter()
        self.seconds = np.zeros(2)  # target, drafting
        # By position; scalars until the first step is observed.
        self.drafted = self.accepted = np.zeros(())

    def observe(self, stats: "SchedulerStats") -> None:
        if (step := stats.step_drafting) is None:
            return
        self.last = step
        self.steps_by_length[step.is_tree, step.draft_length] += 1
        if (verified := stats.spec_decoding_stats) is not None:
            self.drafted = self.drafted + verified.num_draft_tokens_per_pos
            self.accepted = self.accepted + verified.num_accepted_tokens_per_pos
        if step.seconds is not None:
            self.seconds += step.seconds

    def added_to(self, log_fn: Callable[..., None]) -> Callable[..., None]:
        """A `log_fn` that appends the summary to its line, if there was a step."""
        if self.last is None:
            return log_fn
        summary = ", ".join(self._parts(self.last))
        return lambda line, *args: log_fn(f"{line}, %s", *args, summary)

    def by_depth(self, accepted: np.ndarray) -> np.ndarray:
        """Cuts counts by position, [steps, N], to those that were drafted: with trees
        of N nodes there are N, but no draft is deeper than K."""
        if not self.drafted.any():
            return accepted
        return accepted[:, : np.flatnonzero(self.drafted)[-1] + 1]

    def log_alone(self, log_fn: Callable[..., None]) -> None:
        """Logs an interval in which no drafts were verified, if any step ran."""
        if self.last is not None:
            self.added_to(log_fn)("SpecDecoding metrics: no drafts verified")
            self.__init__()

    def _parts(self, last: StepDrafting) -> Iterator[str]:
        yield f"Method: {last.method}, Mode: {last.mode}"
        if self.seconds.any():
            yield f"Draft time share: {self.seconds[1] / self.seconds.sum():.1%}"
        if last.gain is not None:
            yield f"Gain over no drafts: {last.gain:.2f}"
        if len(self.steps_by_length) == 1:
            yield f"Draft length: {_length(next(iter(self.steps_by_length)))}"
            return
        counts, total = self.steps_by_length, self.steps_by_length.total()
        shares = [
            f"{_length(one)} ({counts[one] / total:.0%})" for one in sorted(counts)
        ]
        yield f"Draft length (of steps): {', '.join(shares)}"
        # vLLM's rates divide by all drafts: positions not drafted would look rejected.
        rates = self.accepted[self.drafted > 0] / self.drafted[self.drafted > 0]
        if rates.size:
            listed = ", ".join(f"{rate:.3f}" for rate in rates)
            yield f"Per-position acceptance rate where drafted: {listed}"


def _length(drafted: tuple[bool, int]) -> str:
    is_tree, length = drafted
    return f"tree of {length}" if is_tree else f"{length}"


class StepCounters:
    """The Prometheus counters and gauges, each by engine.

    A gauge is NaN until it has a value.

    Args:
        counter_cls: Prometheus' counter class, or one with its interface.
        gauge_cls: Prometheus' gauge class, or one with its interface.
        spec: config of the drafts that are counted.
        labelnames: of every metric.
        labelvalues: of each engine, by its index.
    """

    def __init__(
        self,
        counter_cls: Any,
        gauge_cls: Any,
        spec: "SpeculativeConfig",
        labelnames: list[str],
        labelvalues: dict[int, list[object]],
    ):
        def counter(name: str, about: str) -> dict[int, Any]:
            made = counter_cls(PREFIX + name, about, labelnames)
            return {each: made.labels(*own) for each, own in labelvalues.items()}

        def counters(name: str, about: str, label: str, number: int) -> dict[int, Any]:
            """One for each value of another label, from 0 on."""
            made = counter_cls(PREFIX + name, about, [*labelnames, label])
            return {
                each: [made.labels(*own, str(i)) for i in range(number)]
                for each, own in labelvalues.items()
            }

        def gauge(name: str, about: str) -> dict[int, Any]:
            how = {"multiprocess_mode": "mostrecent"}
            made = gauge_cls(PREFIX + name, about, labelnames, **how)
            found = {each: made.labels(*own) for each, own in labelvalues.items()}
            for each in found.values():
                each.set(nan)
            return found

        drafter, most = spec.drafter, spec.drafter.num_verified
        self.drafted = counters(
            "num_draft_tokens_per_pos",
            "Draft tokens that were verified, per draft position.",
            "position",
            most,
        )
        self.steps = counters(
            "num_steps",
            "Engine steps, by how many tokens each request was to draft, or how many "
            "nodes of a tree.",
            "draft_length",
            most + 1,
        )
        if drafter.num_nodes is not None:
            about = "Nodes of draft trees that were verified."
            self.tree_nodes = counter("num_tree_nodes", about)
            self.accepted_nodes = counters(
                "num_accepted_tree_nodes",
                "Accepted nodes of draft trees, by the rank of their token at its "
                "depth.",
                "rank",
                num_candidates(drafter.num_nodes),
            )
        self.timed = counter("num_timed_steps", "Steps that were timed.")
        self.seconds = [
            counter(
                "target_seconds",
                "Seconds of timed steps until the target's are sampled.",
            ),
            counter("draft_seconds", "Seconds of timed steps spent drafting."),
        ]
        about = "Mean accepted tokens of recent drafts + 1."
        self.acceptance_length = gauge("acceptance_length", about)
        # Accepted tokens per draft, by engine.
        self.recent = {engine: Faded(RECENT_DRAFTS) for engine in labelvalues}
        self.gain: dict[int, Any] = {}
        if drafter.is_fitted and is_auto(spec):
            about = "Throughput over that without drafts, by step times."
            self.gain = gauge("gain", about)

    def observe(self, stats: "SchedulerStats", engine: int) -> None:
        if (step := stats.step_drafting) is None:
            return
        if (verified := stats.spec_decoding_stats) is not None:
            self._observe_drafts(verified, engine)
        self.steps[engine][step.draft_length].inc()
        if step.seconds is not None:
            self.timed[engine].inc()
            for counter, seconds in zip(self.seconds, step.seconds, strict=True):
                counter[engine].inc(seconds)
        if step.gain is not None and self.gain:
            self.gain[engine].set(step.gain)

    def _observe_drafts(self, verified: "SpecDecodingStats", engine: int) -> None:
        drafted = verified.num_draft_tokens_per_pos
        for counter, count in zip(self.drafted[engine], drafted, strict=True):
            if count:
                counter.inc(count)
        if drafts := verified.num_drafts:
            recent = self.recent[engine]
            recent.fade(drafts)
            recent.add(verified.num_accepted_tokens, drafts)
            self.acceptance_length[engine].set(1.0 + recent.mean)
        if verified.trees is not None:
            self.tree_nodes[engine].inc(verified.trees.num_nodes)
            by_rank = self.accepted_nodes[engine]
            for rank, count in verified.trees.accepted_by_rank.items():
                # A head of the DFlash family may have more candidates.
                by_rank[min(rank, len(by_rank) - 1)].inc(count)


def counted(name: str, value: float) -> float:
    """A counter's value for `LLM.get_metrics()`: an integer unless in `IN_PARTS`."""
    return value if name.removeprefix(PREFIX) in IN_PARTS else int(value)


def with_mode(
    spec: "SpeculativeConfig | None", names: list[str], values: dict[int, list[object]]
) -> tuple[list[str], dict[int, list[object]]]:
    """Names and values, by engine, of a metric's labels, with `method` and `mode`."""
    if spec is None:
        return names, values
    own = [spec.method, spec.drafter.mode]
    own_values = {engine: [*given, *own] for engine, given in values.items()}
    return [*names, "method", "mode"], own_values
