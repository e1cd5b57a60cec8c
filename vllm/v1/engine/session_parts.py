# SPDX-License-Identifier: Apache-2.0
"""Parts of streamed input whose sampling parameters a session cannot follow.

A session keeps the grammar of its first part, and what its outputs collect.
"""

from typing import TYPE_CHECKING

from vllm.exceptions import VLLMValidationError

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.engine.output_processor import RequestState


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
