# SPDX-License-Identifier: Apache-2.0
"""Servers, and answers of the target alone."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.v1.e2e.oracle import load_model

from .clients import LONGEST_OUTPUT, LONGEST_PROMPT, Answer, answer_alone
from .server import Server

# Of prompts in turn. With a penalty, logits depend on the draft tokens before them.
SAMPLING = [
    {"temperature": 0},
    {"temperature": 0, "repetition_penalty": 1.3},
    {"temperature": 0},
    {"temperature": 0.5, "seed": 3},
    {"temperature": 0},
]


@pytest.fixture(scope="module")
def serve(models, engine_env, engine_flags, tmp_path_factory) -> Callable[..., Server]:
    """Makes a server of the bundled target with the given flags."""

    def make(*flags: str) -> Server:
        log = tmp_path_factory.mktemp("server") / "log.txt"
        env = engine_env | {"VLLM_LOG_STATS_INTERVAL": "1"}
        return Server(models / "target", [*engine_flags, *flags], env, log)

    return make


@pytest.fixture(scope="session")
def answers(models: Path, held_out_tokens: list[int]) -> list[Answer]:
    """Answers to 12 prompts, some of which share a prefix, for the prefix cache."""
    target, draw = load_model(models / "target"), random.Random(0)
    starts = [draw.randrange(len(held_out_tokens) - LONGEST_PROMPT) for _ in range(4)]
    found = []
    for number in range(12):
        start = starts[number % len(starts)]
        prompt = held_out_tokens[start : start + draw.randint(1, LONGEST_PROMPT)]
        sampling = SAMPLING[number % len(SAMPLING)]
        found.append(answer_alone(target, prompt, sampling, LONGEST_OUTPUT))
    return found
