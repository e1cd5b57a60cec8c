# SPDX-License-Identifier: Apache-2.0
"""Seam on `vllm/v1/spec_decode/metrics.py`.

Why: neither metrics nor log tell what drafts, how many tokens it was asked for, how
    long it takes, or how many drafts a position had.
How: a step's stats carry that; the log line ends with it, and counters count it.
    Every metric of speculative decoding gets the labels `method` and `mode`.
Upstream: "[Spec Decode] Metrics: draft time, draft length, acceptance where drafted".
Until: upstream shows as much.
"""

from dataclasses import dataclass

from vllm._upstream import stand_on
from vllm.v1.spec_decode import step_metrics

upstream = stand_on(__name__)


@dataclass
class SpecDecodingStats(upstream.SpecDecodingStats):
    step: step_metrics.StepDrafting | None = None


class SpecDecodingLogging(upstream.SpecDecodingLogging):
    def reset(self):
        super().reset()
        self.steps = step_metrics.StepSummary()

    def observe(self, spec_decoding_stats):
        self.steps.observe(spec_decoding_stats)
        if spec_decoding_stats.num_drafts:
            super().observe(spec_decoding_stats)

    def log(self, log_fn=upstream.logger.info):
        summary = self.steps.describe()
        if not summary:
            super().log(log_fn)
        elif self.num_drafts:
            super().log(lambda line, *args: log_fn(f"{line}, %s", *args, summary))
        else:
            log_fn("SpecDecoding metrics: no drafts verified, %s", summary)
            self.reset()


class SpecDecodingProm(upstream.SpecDecodingProm):
    def __init__(self, spec, labelnames, per_engine_labelvalues, **kwargs):
        labels = step_metrics.with_mode(spec, labelnames, per_engine_labelvalues)
        super().__init__(spec, *labels, **kwargs)
        self.steps = spec and step_metrics.StepCounters(
            self._counter_cls, spec.num_speculative_tokens, *labels
        )

    def observe(self, spec_decoding_stats, engine_idx=0):
        super().observe(spec_decoding_stats, engine_idx)
        if self.steps:
            self.steps.observe(spec_decoding_stats, engine_idx)
