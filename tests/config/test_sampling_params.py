# SPDX-License-Identifier: Apache-2.0
"""Sampling parameters that vLLM does not support with speculative decoding."""

from types import SimpleNamespace

import pytest

from vllm import SamplingParams
from vllm.config.drafter import DrafterConfig
from vllm.exceptions import VLLMValidationError


@pytest.mark.parametrize("given", [{"min_p": 0.1}, {"logit_bias": {1: 2.0}}], ids=str)
@pytest.mark.parametrize("is_unified", [True, False])
def test_min_p_and_logit_bias_need_unified_speculator(given: dict, is_unified: bool):
    spec = SimpleNamespace(drafter=DrafterConfig("eagle3", 3, is_unified=is_unified))
    params = SamplingParams(**given)
    if is_unified:
        params._validate_spec_decode(spec)
    else:
        with pytest.raises(VLLMValidationError, match="min_p and logit_bias"):
            params._validate_spec_decode(spec)
