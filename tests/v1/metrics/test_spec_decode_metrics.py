# SPDX-License-Identifier: Apache-2.0
"""What a step says of its drafting reaches the log line and Prometheus."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry, Counter

from vllm.config.drafter import DrafterConfig
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder
from vllm.v1.spec_decode.accepted_nodes import AcceptedNodes
from vllm.v1.spec_decode.metrics import (
    SpecDecodingLogging,
    SpecDecodingProm,
    SpecDecodingStats,
)
from vllm.v1.spec_decode.step_metrics import StepDrafting, observe_tree

K = 3
PARD = DrafterConfig("draft_model", K, is_parallel=True)
N = 9  # nodes of a tree
PREFIX = "vllm:spec_decode_"


def step(drafts=(), length=K, seconds=None, mode="pard") -> SchedulerStats:
    """Stats of a step that verified `drafts`, (drafted, accepted) for each request."""
    verified = SpecDecodingStats.new(K) if drafts else None
    for drafted, accepted in drafts:
        verified.observe_draft(drafted, accepted)
    return SchedulerStats(
        spec_decoding_stats=verified,
        step_drafting=StepDrafting("draft_model", mode, length, seconds),
    )


def step_with_trees(*trees: tuple[list[int], list[int]]) -> SchedulerStats:
    """Stats of a step that verified trees, (numbers, ranks) of each one's path."""
    verified = SpecDecodingStats.new(N)
    for numbers, ranks in trees:
        verified.observe_draft(N, len(numbers))
        observe_tree(verified, N, AcceptedNodes(numbers, ranks, K))
    return SchedulerStats(
        spec_decoding_stats=verified,
        step_drafting=StepDrafting("draft_model", "pard", N),
    )


TREES = step_with_trees(([1, 2, 7], [0, 0, 2]), ([5], [1]), ([], []))


@pytest.mark.parametrize(
    "sent", [step([(3, 1)]), step([(3, 1)], length=2, seconds=(0.03, 0.01)), TREES]
)
def test_stats_survive_the_way_to_the_front_end(sent):
    frames = MsgpackEncoder().encode(EngineCoreOutputs(scheduler_stats=sent))
    received = MsgpackDecoder(EngineCoreOutputs).decode(frames)
    assert received.scheduler_stats == sent


# The log line.


def logged(*steps: SchedulerStats) -> str:
    """As the stat logger of an engine does it."""
    logging, lines = SpecDecodingLogging(), []
    for stats in steps:
        if stats.spec_decoding_stats is not None:
            logging.observe(stats.spec_decoding_stats)
        logging.steps.observe(stats)
    logging.log(lambda line, *args: lines.append(line % args))
    logging.log(lambda *_: pytest.fail("the interval was over"))
    assert len(lines) == 1
    return lines[0]


def test_one_draft_length():
    line = logged(step([(3, 1), (3, 2)]), step([(3, 3)], seconds=(0.03, 0.01)))
    assert line.startswith("SpecDecoding metrics: Mean acceptance length: 3.00, ")
    assert line.endswith(
        ", Method: draft_model, Mode: pard, Draft time share: 25.0%, Draft length: 3"
    )


def test_share_is_of_all_timed_steps():
    line = logged(step([(3, 1)], seconds=(1.0, 3.0)), step(seconds=(5.0, 1.0)))
    assert "Draft time share: 40.0%" in line


def test_without_timed_steps_there_is_no_share():
    assert "share" not in logged(step([(3, 1)]))


def test_several_draft_lengths():
    """Acceptance is told of what was drafted: positions 1 and 2 were, by one of two."""
    short = step([(1, 1)], length=1)
    line = logged(step([(3, 2)]), short, step(length=1), step(length=0))
    assert "Draft length (of steps): 0 (25%), 1 (50%), 3 (25%)" in line
    assert line.endswith("acceptance rate where drafted: 1.000, 1.000, 0.000")
    assert "Per-position acceptance rate: 1.000, 0.500, 0.000" in line  # vLLM's


def test_trees_tell_which_ranks_were_accepted():
    line = logged(TREES, step_with_trees(([1], [0])))
    assert ", Rank of accepted nodes: 0 (60%), 1 (20%), 2 (20%)" in line


def test_positions_of_a_tree_are_depths():
    """Defect: nodes past the last depth seemed drafted there, and rejected."""
    other = step_with_trees(([1], [0]))
    other.step_drafting = replace(other.step_drafting, draft_length=K)
    line = logged(TREES, other)
    assert line.endswith("acceptance rate where drafted: 0.750, 0.250, 0.250")


def test_interval_without_drafts():
    line = logged(step(length=0), step(length=0, seconds=(0.03, 0.01)))
    assert line == (
        "SpecDecoding metrics: no drafts verified, Method: draft_model, Mode: pard, "
        "Draft time share: 25.0%, Draft length: 0"
    )


def test_nothing_is_logged_without_steps():
    SpecDecodingLogging().log(lambda *_: pytest.fail("there was no step"))


def test_stats_without_a_step_are_logged_as_in_vllm():
    stats = step([(3, 1)])
    stats.step_drafting = None
    assert logged(stats).endswith("Avg Draft acceptance rate: 33.3%")


# Prometheus.


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def prom(registry):
    class Prom(SpecDecodingProm):
        _counter_cls = partial(Counter, registry=registry)

    def make(spec):
        engines = {0: ["target", "0"], 1: ["target", "1"]}
        return Prom(spec, ["model_name", "engine"], engines)

    return make


def values(registry, name: str, label: str, engine: str = "1") -> list[float]:
    return [
        sample.value
        for metric in registry.collect()
        for sample in metric.samples
        if sample.name == f"{PREFIX}{name}_total" and sample.labels["engine"] == engine
        if not label or sample.labels[label]
    ]


def observe(counters: SpecDecodingProm, stats: SchedulerStats) -> None:
    """As the Prometheus logger does it, for engine 1."""
    if stats.spec_decoding_stats is not None:
        counters.observe(stats.spec_decoding_stats, 1)
    counters.steps.observe(stats, 1)


def test_counters(prom, registry):
    spec = SimpleNamespace(method="draft_model", drafter=PARD, num_speculative_tokens=K)
    counters = prom(spec)
    observe(counters, step([(3, 2), (3, 0)], seconds=(0.25, 0.5)))
    observe(counters, step([(1, 1)], length=0))
    observe(counters, step(seconds=(0.5, 0.25)))
    assert values(registry, "num_draft_tokens_per_pos", "position") == [3, 2, 2]
    assert values(registry, "num_accepted_tokens_per_pos", "position") == [2, 1, 0]
    assert values(registry, "num_steps", "draft_length") == [1, 0, 0, 2]
    for name, value in ("num_timed_steps", 2), ("target_seconds", 0.75):
        assert values(registry, name, "") == [value]
    assert values(registry, "draft_seconds", "") == [0.75]
    assert not any(values(registry, "num_steps", "draft_length", engine="0"))


def test_counters_of_trees(prom, registry):
    drafter = replace(PARD, num_nodes=N)
    spec = SimpleNamespace(
        method="draft_model", drafter=drafter, num_speculative_tokens=N
    )
    counters = prom(spec)
    for _ in range(2):
        observe(counters, TREES)
    assert values(registry, "num_tree_nodes", "") == [2 * 3 * N]
    by_rank = values(registry, "num_accepted_tree_nodes", "rank")
    assert by_rank == [4, 2, 2, 0, 0, 0, 0, 0]
    by_depth = values(registry, "num_accepted_tokens_per_pos", "position")
    assert (by_depth[:K], sum(by_depth)) == ([4, 2, 2], sum(by_rank))
    drafted = values(registry, "num_draft_tokens_per_pos", "position")
    assert drafted == [6, 6, 6] + [0] * (N - K)


def test_every_metric_tells_method_and_mode(prom, registry):
    prom(SimpleNamespace(method="draft_model", drafter=PARD, num_speculative_tokens=K))
    samples = [s for metric in registry.collect() for s in metric.samples]
    assert len({sample.name for sample in samples if "_total" in sample.name}) == 11
    for sample in samples:
        assert sample.labels["method"] == "draft_model"
        assert sample.labels["mode"] == "pard"


def test_without_speculation_there_are_no_metrics(prom, registry):
    counters = prom(None)
    counters.observe(step([(3, 1)]).spec_decoding_stats)
    assert counters.steps is None
    assert list(registry.collect()) == []
