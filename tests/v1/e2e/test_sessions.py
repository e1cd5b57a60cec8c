# SPDX-License-Identifier: Apache-2.0
"""Sessions of streamed input: each part is answered as the target alone would.

A part may end within accepted drafts. The next one continues from the tokens that were
kept, without the last of them, whose KV is not computed yet.
"""

import random
from itertools import product
from typing import Any

import pytest

from .hooks import pause_every, preempt_every
from .oracle import choices, seeded_choices
from .runner import Request
from .sessions import Session, answer_sessions
from .test_unified_speculator import (
    MAX_MODEL_LEN,
    SAMPLING,
    only_fast,
    speculative,
)

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
    "async": {
        "async_scheduling": True,
        "max_num_batched_tokens": 48,
    },
}


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
        if params.seed is not None:
            wanted = seeded_choices(target, text, len(prompt), **SAMPLING)
        else:
            wanted = choices(target, text)[len(prompt) - 1 : -1]
        assert answer == wanted
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
