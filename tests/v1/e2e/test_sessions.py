# SPDX-License-Identifier: Apache-2.0
"""Sessions of streamed input: each part is answered as the target alone would.

A part may end within accepted drafts. The next one continues from the tokens that were
kept, without the last of them, whose KV is not computed yet.
"""

import random
from copy import deepcopy
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest

from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind

from .hooks import pause_every, preempt_every
from .oracle import compare_drafts, own_tokens
from .runner import Engine, Request, Served, keep
from .test_unified_speculator import (
    MAX_MODEL_LEN,
    SAMPLING,
    only_fast,
    oracle_of,
    speculative,
)
from .watches import Drafts

# By name: mode, depth, and other keys of the speculative config.
DRAFTERS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "draft": ("draft", 5, {"draft_sample_method": "probabilistic"}),
    "pard": ("pard", 7, {}),
    "eagle3": ("eagle3", 4, {}),
    "tree": ("pard", 4, {"draft_tree": 15}),
    "beams": ("eagle3", 4, {"draft_tree": 9}),
}
SESSIONS, PARTS = 10, 3
STOPS = [201, 16, 10, 266, 260]  # of the target's most frequent tokens
# Asynchronous engines also preempt and pause.
ENGINES: dict[str, dict[str, Any]] = {
    "sync": {"max_num_batched_tokens": 128},
    "async": {"async_scheduling": True, "max_num_batched_tokens": 48},
}


@dataclass
class Session:
    """Parts of a prompt, each of which continues after the one before was answered."""

    parts: list[Request]
    is_late: bool = False  # each part arrives only then, instead of all at once

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


def make_sessions(make_prompt, depth: int) -> list[Session]:
    """Some are sampled with a seed; some parts have one token, some several blocks.

    The last part of the last two does not fit into the context.
    """
    draw, sessions = random.Random(0), []
    for number in range(SESSIONS):
        parts = []
        for at in range(PARTS):
            length, count = draw.choice((1, 2, 9, 40)), draw.randint(1, 2 * depth)
            sampling = {"stop_token_ids": draw.choice(([], STOPS))}
            sampling |= SAMPLING if number % 4 == 0 else {}
            prompt = make_prompt(length, PARTS * number + at)
            parts.append(Request(prompt, count, **sampling))
        sessions.append(Session(parts, is_late=number % 2 == 1))
    for session in sessions[-2:]:
        session.parts[-1].prompt = make_prompt(MAX_MODEL_LEN - 1, 0)
    return sessions


def assert_answered_as_by_target(target, session: Session, tokens, ends) -> int:
    """Returns how many parts ended with a stop token before their last token."""
    text, begin, stopped = [], 0, 0
    for part, end in zip(session.parts[: len(ends)], ends, strict=True):
        prompt, answer = text[:-1] + part.prompt, tokens[begin:end]
        text, begin, params = prompt + answer, end, part.params
        assert answer == own_tokens(target, text, len(prompt), params)
        if len(answer) < params.max_tokens:
            assert answer[-1] in params.stop_token_ids
            stopped += 1
    return stopped


@pytest.mark.parametrize(
    "case",
    only_fast(map("-".join, product(DRAFTERS, ENGINES)), "draft-async", "tree-sync"),
)
def test_sessions_are_answered_as_by_target(
    case: str, vllm_runner, models, target, make_prompt
):
    drafter, engine = case.split("-")
    mode, depth, more = DRAFTERS[drafter]
    sessions, stopped = make_sessions(make_prompt, depth), 0
    with vllm_runner(
        speculative_config=speculative(models, mode, depth, **more),
        max_model_len=MAX_MODEL_LEN,
        # vLLM keeps a state for a session that waits for its next part, and admits
        # another request in its place: with fewer, there may be no state left.
        max_num_seqs=SESSIONS,
        **ENGINES[engine],
    ) as llm:
        if engine == "async":
            llm.call(preempt_every, 7)
            llm.call(pause_every, 4)
        served, all_ends, reasons = llm.call(answer_sessions, sessions)
    assert reasons.count("error") == 2
    for number, session in enumerate(sessions):
        ends = all_ends[number]
        assert len(ends) == PARTS
        if number >= SESSIONS - 2:
            ends.pop()
            assert reasons[number] == "error"
        tokens = served.tokens[number]
        stopped += assert_answered_as_by_target(target, session, tokens, ends)
    assert stopped > 0
    assert served.count("num_accepted_tokens") > 0
    assert served.count("num_preemptions") > 0 or engine == "sync"


@pytest.mark.slow
def test_drafts_after_a_replaced_token(vllm_runner, models, target):
    """Each new part replaces the last sampled token. PARD-2 uses no state that was kept
    for it, wherever it is in a block."""
    prompts = [[*range(100, 121)], [*range(200, 214)], [7] * 9], [[5], [6, 7] * 5]
    count = drafts = 5
    sessions = [Session([Request(part, count) for part in parts]) for parts in prompts]
    with vllm_runner(
        speculative_config=speculative(models, "pard2", drafts),
        max_model_len=160,
        block_size=32,
    ) as llm:
        llm.watch(Drafts)
        served, *_ = llm.call(answer_sessions, sessions)
    texts, replaced = [], set()
    for number, parts in enumerate(prompts):
        text: list[int] = []
        for at, part in enumerate(parts):
            tokens = served.tokens[number][count * at : count * (at + 1)]
            text = text[:-1] + part + tokens
            replaced |= {(number, len(text) + past) for past in range(drafts + 1)}
        texts.append(text)
    kept = [row for row in served.drafts if row[:2] not in replaced]
    oracle = oracle_of("pard2", models, target)
    assert compare_drafts(kept, texts, oracle, width=drafts) > 5
