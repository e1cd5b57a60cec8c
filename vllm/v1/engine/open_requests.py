# SPDX-License-Identifier: Apache-2.0
"""Ends the requests that are open when a server is stopped."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.output_processor import OutputProcessor


def end_open_requests(engine: "AsyncLLM") -> None:
    """Aborts all open requests, so that the HTTP server need not wait until clients
    give up. It may be called from any thread.

    An engine core that is stopped without a timeout is killed at once: it aborts its
    requests itself only if no step is running.
    """
    handler = getattr(engine, "output_handler", None)
    if handler is None or (loop := handler.get_loop()).is_closed():
        return  # there was no request, or nobody waits for one
    loop.call_soon_threadsafe(_abort_all, engine.output_processor)


def _abort_all(processor: "OutputProcessor") -> None:
    processor.abort_requests(list(processor.request_states), internal=True)
