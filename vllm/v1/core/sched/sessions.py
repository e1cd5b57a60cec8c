# SPDX-License-Identifier: Apache-2.0
"""Parts of streamed input that do not fit into the context.

The front end checks each part alone. What a session has kept of its earlier parts and
answers is known to the scheduler only, when the part is due.
"""

from typing import TYPE_CHECKING

from vllm.outputs import RequestError
from vllm.v1.request import RequestStatus

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request, StreamingUpdate


def refuse_long_part(
    scheduler: "Scheduler", session: "Request", update: "StreamingUpdate"
) -> bool:
    """Whether a part leaves no room for an answer; the session then ends with an error.

    It waits until the scheduler's next output has that error.
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
