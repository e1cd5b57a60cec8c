# SPDX-License-Identifier: Apache-2.0
"""What a chosen draft length is expected to come to reaches Prometheus."""

from functools import partial
from types import SimpleNamespace

from prometheus_client import CollectorRegistry, Counter

from vllm.config.drafter import DrafterConfig
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder
from vllm.v1.spec_decode.step_metrics import StepCounters, StepDrafting


def stats(expected) -> SchedulerStats:
    step = StepDrafting("draft_model", "pard", 3, expected=expected)
    return SchedulerStats(step_drafting=step)


def test_it_survives_the_way_to_the_front_end():
    frames = MsgpackEncoder().encode(
        EngineCoreOutputs(scheduler_stats=stats((9.5, 0.01)))
    )
    received = MsgpackDecoder(EngineCoreOutputs).decode(frames)
    assert tuple(received.scheduler_stats.step_drafting.expected) == (9.5, 0.01)


def test_tokens_and_seconds_add_up():
    """Their quotient is the throughput expected; a fixed length expects none."""
    registry = CollectorRegistry()
    counter = partial(Counter, registry=registry)
    drafter = DrafterConfig("draft_model", 3)
    spec = SimpleNamespace(drafter=drafter, num_speculative_tokens=3)
    counters = StepCounters(counter, spec, ["engine"], {0: ["0"]})
    for expected in ((9.5, 0.01), None, (10.5, 0.03)):
        counters.observe(stats(expected), 0)

    def value(name: str) -> float:
        name = f"vllm:spec_decode_expected_{name}_total"
        return registry.get_sample_value(name, {"engine": "0"})

    assert (value("tokens"), value("seconds")) == (20.0, 0.04)
