# SPDX-License-Identifier: Apache-2.0
"""Sessions of streamed input: each part is answered as the target would alone.

A part may end within accepted drafts. The next one continues from the tokens that were
kept, without the last of them, which is not computed yet.
"""

import random
from typing import Any

import pytest

from .conftest import RunEngine
from .oracle import choices
from .test_unified_speculator import MAX_MODEL_LEN, only_fast, speculative

DRAFTERS = {
    "pard": ("pard", 7, {}),
    "draft": ("draft", 5, {}),
    "eagle3": ("eagle3", 4, {}),
    "tree": ("pard", 4, {"draft_tree": 15}),
    "stepwise tree": ("eagle3", 4, {"draft_tree": 9}),
}
SESSIONS = 12
STOPS = [201, 16, 10, 266, 260]


def make_sessions(make_prompt, deepest: int) -> list[dict[str, Any]]:
    """Of three parts each, of which some have one token, and some several blocks."""
    draw = random.Random(0)
    sessions = []
    for number in range(SESSIONS):
        parts = [
            {
                "prompt": make_prompt(draw.choice((1, 2, 9, 30)), 3 * number + at),
                "max_tokens": draw.randint(1, 2 * deepest),
                "sampling": {"stop_token_ids": draw.choice(([], STOPS))},
            }
            for at in range(3)
        ]
        first, *then = parts
        sessions.append(first | {"then": then, "stream": True, "is_late": number % 2})
    return sessions


def assert_sessions_match_target(target, sessions, found) -> None:
    wrong, stopped = [], 0
    for number, session in enumerate(sessions):
        text, begin = [], 0
        for part, end in zip(
            [session, *session["then"]], found["parts"][number], strict=True
        ):
            prompt, answer = text[:-1] + part["prompt"], found["tokens"][number]
            answer = answer[begin:end]
            text, begin = prompt + answer, end
            is_stopped = answer[-1] in part["sampling"]["stop_token_ids"]
            stopped += is_stopped and len(answer) < part["max_tokens"]
            assert is_stopped or len(answer) == part["max_tokens"]
            if answer != choices(target, text)[len(prompt) - 1 : -1]:
                wrong.append(number)
    assert wrong == []
    assert stopped > 0


CASES = [f"{drafter}-{order}" for drafter in DRAFTERS for order in ("sync", "async")]


@pytest.mark.parametrize("case", CASES)
def test_sessions_match_target(case, run_engine: RunEngine, models, target, make_prompt):
    drafter, order = case.split("-")
    mode, depth, more = DRAFTERS[drafter]
    sessions = make_sessions(make_prompt, depth)
    result = run_engine(
        {"sessions": sessions},
        speculative_config=speculative(models, mode, depth, **more),
        max_model_len=MAX_MODEL_LEN,
        async_scheduling=order == "async",
        max_num_seqs=8,
        max_num_batched_tokens=128,
    )
    assert_sessions_match_target(target, sessions, result["scenarios"]["sessions"])
    assert result["leaked_blocks"] == 0
