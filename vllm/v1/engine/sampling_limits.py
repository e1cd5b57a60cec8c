# SPDX-License-Identifier: Apache-2.0
"""Limits of sampling parameters: Runner V2's sampling states have fixed sizes.

They raise in the worker if a request exceeds them, which ends the engine.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import vllm.envs as envs
from vllm.exceptions import VLLMValidationError

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.sampling_params import SamplingParams

INT32_MAX, INT64_MAX = 2**31 - 1, 2**63 - 1


def check_sampling_limits(params: "SamplingParams", vllm_config: "VllmConfig") -> None:
    """Checks a request's own parameters, once all of them are filled in.

    Raises:
        VLLMValidationError: one of them exceeds Runner V2's sampling states.
    """
    for name, size, limit in _sizes(params, vllm_config):
        if size > limit and vllm_config.use_v2_model_runner:
            raise VLLMValidationError(
                f"{name} must be at most {limit}, got {size}.",
                parameter=name.partition(" ")[0],
                value=size,
            )


def _sizes(
    params: "SamplingParams", vllm_config: "VllmConfig"
) -> Iterator[tuple[str, int, int]]:
    """Name, size in the request, and limit of each limited parameter."""
    from vllm.v1.worker.gpu.sample.logit_bias import (
        MAX_NUM_ALLOWED_TOKEN_IDS,
        MAX_NUM_LOGIT_BIAS_TOKENS,
        MAX_NUM_STOP_TOKEN_IDS,
    )

    if params.logit_bias:
        yield "logit_bias entries", len(params.logit_bias), MAX_NUM_LOGIT_BIAS_TOKENS
    if allowed := params.allowed_token_ids:
        yield "allowed_token_ids entries", len(allowed), MAX_NUM_ALLOWED_TOKEN_IDS
    if params.min_tokens > 0:
        stops = len(params.all_stop_token_ids)
        yield "stop_token_ids entries with min_tokens", stops, MAX_NUM_STOP_TOKEN_IDS
    if words := params.bad_words_token_ids:
        limit = envs.VLLM_MAX_BAD_WORDS_TOTAL_TOKENS
        yield "bad_words tokens", sum(map(len, words)), limit
    if params.seed is not None:
        size = params.seed if params.seed >= 0 else -params.seed - 1
        # Each of several outputs adds its index to the seed.
        most = INT64_MAX if params.seed < 0 else INT64_MAX - (params.n - 1)
        yield "seed", size, most
    if params.max_tokens and params.max_tokens > INT32_MAX // 2:
        # A position is computed from it, in 32 bits.
        limit = INT32_MAX - vllm_config.model_config.max_model_len
        yield "max_tokens", params.max_tokens, limit
