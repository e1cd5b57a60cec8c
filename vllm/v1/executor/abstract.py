# SPDX-License-Identifier: Apache-2.0
"""Seam on `vllm/v1/executor/abstract.py`.

Why: an engine that chooses its draft length must know how long its steps take.
How: once the workers are warm and their graphs captured, steps are timed, and the
    times put where the scheduler, which is made next, finds them.
Upstream: "[Spec Decode] Choose the draft length by measured pass times".
Until: upstream takes `num_speculative_tokens_per_batch_size="auto"`.
"""

from vllm._upstream import stand_on
from vllm.config.draft_length import is_auto

upstream = stand_on(__name__)
Executor = upstream.Executor
_compile_or_warm_up_model = Executor.compile_or_warm_up_model


def _warm_up_and_measure(self: Executor) -> None:
    _compile_or_warm_up_model(self)
    if is_auto(self.speculative_config):
        from vllm.v1.spec_decode.dynamic.pass_times import measure_pass_times

        self.speculative_config.pass_times = measure_pass_times(self)


Executor.compile_or_warm_up_model = _warm_up_and_measure
