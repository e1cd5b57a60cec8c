# SPDX-License-Identifier: Apache-2.0
"""Requests that the engine cannot serve, and that would end it.

Runner V2's sampling states have fixed sizes, and raise in the worker if a request
exceeds them. A session of streamed input keeps the grammar of its first part, and what
its outputs collect; the front end checks each part alone.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import vllm.envs as envs
from vllm.exceptions import VLLMValidationError
from vllm.outputs import RequestError
from vllm.v1.request import RequestStatus

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.sampling_params import SamplingParams
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.engine.output_processor import RequestState
    from vllm.v1.request import Request, StreamingUpdate

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


def check_part(session: "RequestState | None", part: "EngineCoreRequest") -> None:
    """Checks a request that may be a part of streamed input.

    Args:
        session: what its earlier parts have led to; None: it is the first.

    Raises:
        VLLMValidationError: the session would ignore a parameter of the part, or its
            outputs have no place for what the part asks for.
    """
    params = part.sampling_params
    if not part.resumable or params is None:
        return
    if params.structured_outputs is not None:
        raise VLLMValidationError(
            "structured_outputs cannot be combined with streamed input: the grammar "
            "of one part would also constrain the answers to others.",
            parameter="structured_outputs",
        )
    if session is None:
        return
    kept = session.logprobs_processor
    for name, asked, first in (
        ("logprobs", params.num_logprobs, kept.num_logprobs),
        ("prompt_logprobs", params.prompt_logprobs, kept.num_prompt_logprobs),
    ):
        if asked is not None and first is None:
            raise VLLMValidationError(
                f"A part of streamed input can have {name} only if the first part of "
                f"its session has them.",
                parameter=name,
            )


def refuse_long_part(
    scheduler: "Scheduler", session: "Request", update: "StreamingUpdate"
) -> bool:
    """Whether a part of a session leaves no room for an answer.

    The session then ends with an error, and waits until the scheduler's next output
    has it. How much it has kept is known only now that the part is due.
    """
    kept, longest = session.num_tokens - 1, scheduler.max_model_len
    added = len(update.prompt_token_ids or ())
    if kept + added < longest:
        return False
    scheduler.grammar_compile_error_reqs[session.request_id] = RequestError(
        code="validation_error",
        message=f"A part of {added} tokens after {kept} tokens of its session leaves "
        f"no room for an answer: the maximum model length is {longest}. Start another "
        f"session, or raise max_model_len.",
    )
    if session.status == RequestStatus.WAITING_FOR_STREAMING_REQ:
        scheduler.num_waiting_for_streaming_input -= 1
    session.status = RequestStatus.WAITING
    return True
