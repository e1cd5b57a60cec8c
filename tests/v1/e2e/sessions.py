# SPDX-License-Identifier: Apache-2.0
"""Sessions of streamed input: prompts with parts, as `AsyncLLM` accepts them."""

from copy import deepcopy
from dataclasses import dataclass

from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind

from .runner import Engine, Request, Served, keep


@dataclass
class Session:
    """Parts of a prompt, each of which continues after the one before was answered.

    Attributes:
        is_late: whether each part arrives only then, instead of all at once.
    """

    parts: list[Request]
    is_late: bool = False

    def add(self, engine: Engine, name: str, number: int) -> None:
        """Adds a part; the last one also ends the session."""
        llm, part = engine.llm.llm_engine, self.parts[number]
        part.params.output_kind = RequestOutputKind.DELTA
        prompts = [part.prompt] + [[0]] * (number + 1 == len(self.parts))
        for prompt in prompts:
            one = llm.input_processor.process_inputs(
                f"{name}-session",
                {"prompt_token_ids": prompt},
                part.params,
                supported_tasks=llm.get_supported_tasks(),
                resumable=prompt is part.prompt,
            )
            one.external_req_id = name
            llm.output_processor.add_request(one, None, None, 0)
            # Both append to it later, as in separate processes.
            llm.engine_core.add_request(deepcopy(one))


def answer_sessions(
    engine: Engine, sessions: list[Session]
) -> tuple[Served, list[list[int]], list[str | None]]:
    """Answers, each session's number of tokens after each part, and why it finished."""
    outputs: dict[str, RequestOutput] = {}
    ends: list[list[int]] = [[] for _ in sessions]
    reasons: dict[str, str | None] = {}

    def take(output: RequestOutput) -> None:
        name = output.request_id
        session, number = sessions[int(name)], int(name)
        (new,) = output.outputs
        keep(outputs, output, session.parts[0].params)
        if new.finished():
            ends[number].append(len(outputs[name].outputs[0].token_ids))
            reasons[name] = new.finish_reason
            if session.is_late and len(ends[number]) < len(session.parts):
                session.add(engine, name, len(ends[number]))

    def answer() -> list[RequestOutput]:
        for number, session in enumerate(sessions):
            for part in range(1 if session.is_late else len(session.parts)):
                session.add(engine, str(number), part)
        while engine.llm.llm_engine.has_unfinished_requests():
            for output in engine.step():
                take(output)
        return [outputs[str(number)] for number in range(len(sessions))]

    served = engine.served(answer)
    return served, ends, [reasons[str(number)] for number in range(len(sessions))]
