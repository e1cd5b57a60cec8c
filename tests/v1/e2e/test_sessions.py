# SPDX-License-Identifier: Apache-2.0
"""Sessions of streamed input: each part is answered as the target alone would.

A part may end within accepted drafts. The next one continues from the tokens that were
kept, without the last of them, whose KV is not computed yet.
"""

import random
from itertools import product
from typing import Any

import pytest

from .conftest import RunEngine
from .oracle import choices, seeded_choices
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
        "preempts_every": 7,
        "pauses_every": 4,
    },
}


def make_sessions(make_prompt, depth: int) -> list[dict[str, Any]]:
    """Some are sampled with a seed; some parts have one token, some several blocks.

    The last part of the last two does not fit into the context.
    """
    draw, sessions = random.Random(0), []
    for number in range(SESSIONS):
        first, *then = (
            {
                "prompt": make_prompt(draw.choice((1, 2, 9, 40)), PARTS * number + at),
                "max_tokens": draw.randint(1, 2 * depth),
                "sampling": {"stop_token_ids": draw.choice(([], STOPS))}
                | (SAMPLING if number % 4 == 0 else {}),
            }
            for at in range(PARTS)
        )
        sessions.append(first | {"then": then, "stream": True, "is_late": number % 2})
    for session in sessions[-2:]:
        session["then"][-1]["prompt"] = make_prompt(MAX_MODEL_LEN - 1, 0)
    return sessions


def assert_answered_as_by_target(target, session, tokens, ends) -> int:
    """Returns how many parts ended with a stop token before their last token."""
    text, begin, stopped = [], 0, 0
    parts = [session, *session["then"]]
    for part, end in zip(parts[: len(ends)], ends, strict=True):
        prompt, answer = text[:-1] + part["prompt"], tokens[begin:end]
        text, begin, sampling = prompt + answer, end, part["sampling"]
        if "seed" in sampling:
            wanted = seeded_choices(target, text, len(prompt), **SAMPLING)
        else:
            wanted = choices(target, text)[len(prompt) - 1 : -1]
        assert answer == wanted
        if len(answer) < part["max_tokens"]:
            assert answer[-1] in sampling["stop_token_ids"]
            stopped += 1
    return stopped


@pytest.mark.parametrize(
    "case",
    only_fast(map("-".join, product(DRAFTERS, ENGINES)), "draft-async", "tree-sync"),
)
def test_sessions_are_answered_as_by_target(
    case: str, run_engine: RunEngine, models, target, make_prompt
):
    drafter, engine = case.split("-")
    mode, depth, more = DRAFTERS[drafter]
    sessions = make_sessions(make_prompt, depth)
    result = run_engine(
        {"all": sessions},
        speculative_config=speculative(models, mode, depth, **more),
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=8,
        **ENGINES[engine],
    )
    found, stopped = result["scenarios"]["all"], 0
    assert found["ends"].count("error") == 2
    for number, session in enumerate(sessions):
        tokens, ends = found["tokens"][number], found["parts"][number]
        assert len(ends) == PARTS
        if number >= SESSIONS - 2:
            ends.pop()
            assert found["ends"][number] == "error"
        stopped += assert_answered_as_by_target(target, session, tokens, ends)
    assert stopped > 0
    assert found["counters"]["num_accepted_tokens"][0] > 0
    assert found["counters"]["num_preemptions"][0] > 0 or engine == "sync"
    assert result["leaked_blocks"] == 0
