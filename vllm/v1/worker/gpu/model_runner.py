# SPDX-License-Identifier: Apache-2.0
"""Seam on `vllm/v1/worker/gpu/model_runner.py`.

Why: nothing tells how much of a step's time drafting takes. The target hands out the
    states of its layers for certain methods only, of which PARD-2's is none.
How: a clock is told where a step begins, where its tokens are sampled and where it
    ends; what it measured goes to the scheduler with the step's output. A drafter says
    itself whether it taps the target's layers.
Upstream: "[Spec Decode] Metrics: draft time, draft length, acceptance where drafted".
Until: upstream counts the seconds of drafting.
"""

from vllm._upstream import stand_on
from vllm.v1.worker.gpu.spec_decode.step_clock import StepClock

upstream = stand_on(__name__)


class GPUModelRunner(upstream.GPUModelRunner):
    """Times a step now and then, if it drafts."""

    def __init__(self, vllm_config, device):
        super().__init__(vllm_config, device)
        # On the one pipeline stage that drafts, and returns the step's output.
        drafts = self.speculator is not None
        self.step_clock = StepClock(self.device) if drafts else None
        if getattr(self.speculator, "tapped_layers", None):
            self.use_aux_hidden_state_outputs = True

    def execute_model(self, *args, **kwargs):
        if self.step_clock is not None and not kwargs.get("dummy_run"):
            self.step_clock.begin()
        return super().execute_model(*args, **kwargs)

    def postprocess_sampled(self, *args, **kwargs):
        """Called by the base between sampling and drafting."""
        super().postprocess_sampled(*args, **kwargs)
        if self.step_clock is not None:
            self.step_clock.sampled()

    def sample_tokens(self, *args, **kwargs):
        output = super().sample_tokens(*args, **kwargs)
        if self.step_clock is not None and output is not None:
            output.model_runner_output.step_seconds = self.step_clock.end()
        return output


upstream.GPUModelRunner = GPUModelRunner
