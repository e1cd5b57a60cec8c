# SPDX-License-Identifier: Apache-2.0
"""Seam on `vllm/sampling_params.py`.

Why: the base refuses min-p and logit bias with speculative decoding, since Runner V1
    ignores them when it verifies drafts. Runner V2 verifies against all parameters.
How: requests for a drafter of the unified speculator, which is on V2, pass that check.
Upstream: "[Spec Decode] Allow min_p and logit_bias on Model Runner V2".
Until: upstream allows them.
"""

from vllm._upstream import stand_on

upstream = stand_on(__name__)
SamplingParams = upstream.SamplingParams
_validate_spec_decode = SamplingParams._validate_spec_decode


def _validate_unless_unified(self, speculative_config) -> None:
    if getattr(speculative_config, "drafter_owns_buffers", False):
        return
    _validate_spec_decode(self, speculative_config)


SamplingParams._validate_spec_decode = _validate_unless_unified
