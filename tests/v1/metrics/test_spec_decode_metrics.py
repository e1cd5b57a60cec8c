# SPDX-License-Identifier: Apache-2.0
"""Drafting stats of a step reach the log line and Prometheus."""

from dataclasses import replace
from functools import partial
from math import nan
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge

from vllm.config.drafter import DrafterConfig
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.metrics import reader
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder
from vllm.v1.spec_decode.draft_trees import AcceptedNodes
from vllm.v1.spec_decode.metrics import (
    SpecDecodingLogging,
    SpecDecodingProm,
    SpecDecodingStats,
)
from vllm.v1.spec_decode.step_metrics import StepDrafting, observe_tree

K = 3
PARD = DrafterConfig("draft_model", K, is_parallel=True, parallel_width=K)
N = 9  # nodes of a tree
LENGTH_UNKNOWN = {"acceptance_length": nan}


def step(drafts=(), length=K, seconds=None) -> SchedulerStats:
    """Stats of a step that verified `drafts`, (drafted, accepted) for each request."""
    verified = SpecDecodingStats.new(K) if drafts else None
    for drafted, accepted in drafts:
        verified.observe_draft(drafted, accepted)
    return SchedulerStats(
        spec_decoding_stats=verified,
        step_drafting=StepDrafting("draft_model", "pard", length, seconds),
    )


def step_with_trees(
    *trees: tuple[list[int], list[int]], nodes: int = N
) -> SchedulerStats:
    """Stats of a step that verified trees, (numbers, ranks) of each one's path."""
    verified = SpecDecodingStats.new(N)
    for numbers, ranks in trees:
        verified.observe_draft(nodes, len(numbers))
        found = AcceptedNodes(numbers, ranks, K)
        observe_tree(verified, nodes, found, SimpleNamespace(drafter=PARD))
    return SchedulerStats(
        spec_decoding_stats=verified,
        step_drafting=StepDrafting("draft_model", "pard", N, is_tree=True),
    )


TREES = step_with_trees(([1, 2, 7], [0, 0, 2]), ([5], [1]), ([], []))


SHORT, ONE = step([(1, 1)], length=1), step([(3, 1)])
TIMED = step([(3, 1)], length=2, seconds=(0.03, 0.01))


def with_gain(gain: float) -> SchedulerStats:
    return replace(ONE, step_drafting=replace(ONE.step_drafting, gain=gain))


@pytest.mark.parametrize("sent", [ONE, TIMED, TREES, with_gain(1.8)])
def test_stats_survive_serialization(sent):
    frames = MsgpackEncoder().encode(EngineCoreOutputs(scheduler_stats=sent))
    received = MsgpackDecoder(EngineCoreOutputs).decode(frames)
    assert received.scheduler_stats == sent


# The log line.


def logged(*steps: SchedulerStats) -> str:
    """The line that an engine's stat logger writes."""
    logging, lines = SpecDecodingLogging(), []
    for stats in steps:
        if stats.spec_decoding_stats is not None:
            logging.observe(stats.spec_decoding_stats)
        logging.steps.observe(stats)
    logging.log(lambda line, *args: lines.append(line % args))
    logging.log(lambda *_: pytest.fail("the interval was over"))
    assert len(lines) == 1
    return lines[0]


OTHER_TREE = step_with_trees(([1], [0]))
AS_DEEP = replace(OTHER_TREE.step_drafting, draft_length=K, is_tree=False)
CHAIN_ALONE = step_with_trees(([1], [0]), nodes=K)


@pytest.mark.parametrize(
    "steps, expected",
    [
        (
            [step([(3, 1), (3, 2)]), step([(3, 3)], seconds=(0.03, 0.01))],
            ", Method: draft_model, Mode: pard, Draft time share: 25.0%, "
            "Draft length: 3",
        ),
        (
            [step([(3, 1)], seconds=(1.0, 3.0)), step(seconds=(5.0, 1.0))],
            "Draft time share: 40.0%, Draft length: 3",
        ),
        ([with_gain(1.8)], ", Gain over no drafts: 1.80, Draft length: 3"),
        # No step was timed.
        ([ONE], ", Mode: pard, Draft length: 3"),
        # Acceptance counts only steps that drafted the position: one of the two
        # drafted positions 1 and 2.
        (
            [step([(3, 2)]), SHORT, step(length=1), step(length=0)],
            "Draft length (of steps): 0 (25%), 1 (50%), 3 (25%), Per-position "
            "acceptance rate where drafted: 1.000, 1.000, 0.000",
        ),
        ([TREES, OTHER_TREE], ", Mode: pard, Draft length: tree of 9"),
        # Regression: nodes past the last depth were counted as drafted and rejected.
        (
            [TREES, replace(OTHER_TREE, step_drafting=AS_DEEP)],
            "Draft length (of steps): 3 (50%), tree of 9 (50%), Per-position "
            "acceptance rate where drafted: 0.750, 0.250, 0.250",
        ),
        # vLLM's own line is unchanged.
        ([replace(ONE, step_drafting=None)], "Avg Draft acceptance rate: 33.3%"),
    ],
)
def test_log_line_ends_with_draft_lengths(steps, expected: str):
    line = logged(*steps)
    assert line.startswith("SpecDecoding metrics: Mean acceptance length: ")
    assert line.endswith(expected)


@pytest.mark.parametrize(
    "steps, expected",
    [
        ([TREES, OTHER_TREE], "0.750, 0.250, 0.250"),
        # A chain of an engine that may draft trees, too.
        ([replace(CHAIN_ALONE, step_drafting=AS_DEEP)], "1.000, 0.000, 0.000"),
        ([ONE, SHORT], "1.000, 0.000, 0.000"),
        ([SHORT], "1.000"),
    ],
)
def test_log_line_has_a_rate_for_each_drafted_position(steps, expected: str):
    """Regression: it had one for each node of a tree, 0 for all past the last depth."""
    assert f"Per-position acceptance rate: {expected}, Avg" in logged(*steps)


def test_interval_without_drafts():
    line = logged(step(length=0), step(length=0, seconds=(0.03, 0.01)))
    assert line == (
        "SpecDecoding metrics: no drafts verified, Method: draft_model, Mode: pard, "
        "Draft time share: 25.0%, Draft length: 0"
    )
    SpecDecodingLogging().log(lambda *_: pytest.fail("there was no step"))


# Prometheus.


class Prom:
    """Counters of two engines, in their own registry."""

    def __init__(self, drafter: DrafterConfig | None, schedule="auto") -> None:
        self.registry = CollectorRegistry()
        classes = {
            "_counter_cls": partial(Counter, registry=self.registry),
            "_gauge_cls": partial(Gauge, registry=self.registry),
        }
        spec = drafter and SimpleNamespace(
            num_speculative_tokens_per_batch_size=schedule,
            method="draft_model",
            drafter=drafter,
            num_speculative_tokens=drafter.num_nodes or K,
        )
        made = type("Made", (SpecDecodingProm,), classes)
        engines = {0: ["target", "0"], 1: ["target", "1"]}
        self.counters = made(spec, ["model_name", "engine"], engines)

    def observe(self, stats: SchedulerStats) -> None:
        """Observes as the Prometheus logger does, for engine 1."""
        if stats.spec_decoding_stats is not None:
            self.counters.observe(stats.spec_decoding_stats, 1)
        self.counters.steps.observe(stats, 1)

    def samples(self) -> list:
        return [s for metric in self.registry.collect() for s in metric.samples]

    def gauges(self, engine: str = "1") -> dict[str, float]:
        return {
            sample.name.removeprefix("vllm:spec_decode_"): sample.value
            for sample in self.samples()
            if not sample.name.endswith(("_total", "_created"))
            and sample.labels["engine"] == engine
        }

    def values(self, name: str, engine: str = "1") -> list[float]:
        name = f"vllm:spec_decode_{name}_total"
        samples = (one for one in self.samples() if one.name == name)
        return [one.value for one in samples if one.labels["engine"] == engine]


def test_counters():
    prom = Prom(PARD)
    prom.observe(step([(3, 2), (3, 0)], seconds=(0.25, 0.5)))
    prom.observe(step([(1, 1)], length=0))
    prom.observe(step(seconds=(0.5, 0.25)))
    expected = {
        "num_draft_tokens_per_pos": [3, 2, 2],
        "num_accepted_tokens_per_pos": [2, 1, 0],
        "num_steps": [1, 0, 0, 2],
        "num_timed_steps": [2],
        "target_seconds": [0.75],
        "draft_seconds": [0.75],
    }
    assert {name: prom.values(name) for name in expected} == expected
    assert not any(prom.values("num_steps", engine="0"))
    names = {s.name for s in prom.samples() if s.name.endswith("_total")}
    assert len(names) == 9
    labels = [sample.labels for sample in prom.samples()]
    assert {(own["method"], own["mode"]) for own in labels} == {("draft_model", "pard")}


def test_counters_of_trees():
    """A chain in the place of a tree counts no nodes."""
    prom = Prom(replace(PARD, num_nodes=N))
    prom.observe(step_with_trees(([1, 2], [0, 0]), nodes=K))
    assert prom.values("num_draft_tokens") == [K]
    assert prom.values("num_draft_tokens_per_pos") == [1] * K + [0] * (N - K)
    assert not any(prom.values("num_accepted_tree_nodes"))
    for _ in range(2):
        prom.observe(TREES)
    assert prom.values("num_tree_nodes") == [2 * 3 * N]
    assert prom.values("num_accepted_tree_nodes") == [4, 2, 2, 0, 0, 0, 0, 0]
    accepted, drafted = [1 + 4, 1 + 2, 2], [7, 7, 7]
    behind = [0] * (N - K)
    assert prom.values("num_accepted_tokens_per_pos") == accepted + behind
    assert prom.values("num_draft_tokens_per_pos") == drafted + behind


@pytest.mark.parametrize(
    "is_unified, schedule, told",
    [(True, "auto", {"gain": 1.8}), (True, None, {}), (False, "auto", {})],
)
def test_gauges_of_the_unified_speculator(is_unified, schedule, told: dict):
    """A gauge is NaN until there is a value, and then has the last one."""
    prom = Prom(replace(PARD, is_unified=is_unified), schedule)
    nothing = dict.fromkeys(told, nan)
    prom.observe(step(length=0))
    assert prom.gauges() == pytest.approx(nothing | LENGTH_UNKNOWN, nan_ok=True)
    for gain in (2.5, 1.8):
        prom.observe(with_gain(gain))
    assert prom.gauges() == told | {"acceptance_length": 2.0}
    untold = nothing | LENGTH_UNKNOWN
    assert prom.gauges(engine="0") == pytest.approx(untold, nan_ok=True)


def test_acceptance_length_of_recent_drafts():
    """The mean of all drafts while they are few, later of the recent ones."""
    prom = Prom(replace(PARD, is_unified=False))
    prom.observe(step([(3, 3), (3, 0), (1, 1)]))
    prom.observe(step([(3, 2)]))
    few = prom.gauges()["acceptance_length"]
    assert few == pytest.approx(1 + 6 / 4, rel=1e-3)
    for accepted in (2, 0):
        for _ in range(1000):
            prom.observe(step([(3, accepted)] * 64))
        recent = prom.gauges()["acceptance_length"]
        assert recent == pytest.approx(1.0 + accepted, abs=0.01)


def test_get_metrics_has_acceptance_length_and_fractions_of_seconds(monkeypatch):
    """Regression: the seconds of a short run were rounded to 0."""
    prom = Prom(PARD)
    prom.observe(step([(3, 2), (3, 1)], seconds=(0.25, 0.5)))
    monkeypatch.setattr(reader, "REGISTRY", prom.registry)
    told = {
        metric.name.removeprefix("vllm:spec_decode_"): metric.value
        for metric in reader.get_metrics_snapshot()
        if metric.labels["engine"] == "1" and hasattr(metric, "value")
    }
    assert told["target_seconds"] == 0.25
    assert told["acceptance_length"] == 2.5
    assert isinstance(told["num_drafts"], int) and told["num_drafts"] == 2


def test_without_speculation_there_are_no_metrics():
    prom = Prom(None)
    prom.counters.observe(ONE.spec_decoding_stats)
    assert prom.counters.steps is None and prom.samples() == []
