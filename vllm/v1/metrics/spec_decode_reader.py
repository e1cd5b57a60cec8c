# SPDX-License-Identifier: Apache-2.0
"""What `LLM.get_metrics()` tells of speculative decoding beside integer counters."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.metrics.reader import Gauge, Metric

PREFIX = "vllm:spec_decode_"


def counted(name: str, value: float) -> float:
    """A counter's value: seconds as they are, what is counted as an integer."""
    is_time = name.startswith(PREFIX) and name.endswith("_seconds")
    return value if is_time else int(value)


def acceptance_lengths(metrics: "list[Metric]") -> "list[Gauge]":
    """For each engine that has drafted, mean accepted tokens of a draft + 1."""
    from vllm.v1.metrics.reader import Gauge

    accepted, drafts = (
        {frozenset(m.labels.items()): m.value for m in metrics if m.name == name}
        for name in (f"{PREFIX}num_accepted_tokens", f"{PREFIX}num_drafts")
    )
    name = f"{PREFIX}mean_acceptance_length"
    return [
        Gauge(name, dict(labels), 1 + accepted[labels] / number)
        for labels, number in drafts.items()
        if number
    ]
