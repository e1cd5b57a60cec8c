# SPDX-License-Identifier: Apache-2.0
"""Falling acceptance on a `vllm serve`: its gauge, and one log line."""

import random
import time
from collections.abc import Callable, Iterator
from math import isnan
from pathlib import Path

import pytest

from .server import MODEL, Server

# Makes what takes a server most of an hour take seconds.
FAST = """
from vllm.v1.spec_decode import acceptance_watch


def plant():
    acceptance_watch.SECONDS, acceptance_watch.DRAFTS = 0.5, 512
"""
GAUGE = "spec_decode_relative_acceptance_length"
DRAFTS = "spec_decode_num_drafts_total"
USUAL = 2 * 8 * 512  # twice the drafts after which acceptance is compared
LINE = "The acceptance length fell to"
LONGEST = 240  # seconds to wait for a metric
PROMPT_LEN, OUTPUT_LEN, AT_ONCE = 48, 96, 8


@pytest.fixture
def server(
    models, engine_env, engine_flags, plugin, tmp_path: Path
) -> Iterator[Server]:
    env = plugin(engine_env, FAST)
    flags = [*engine_flags, f"--speculative-config={models}/pard"]
    with Server(models / "target", flags, env, tmp_path / "log.txt") as running:
        yield running


class Client:
    """Requests text that the drafter knows, or noise."""

    def __init__(self, server: Server, known: list[int]):
        self.server, self.known, self.chance = server, known, random.Random(0)

    def ask(self, prompts: list[list[int]], temperature: float) -> None:
        more = {"temperature": temperature, "max_tokens": OUTPUT_LEN, "seed": 0}
        ask = self.server.client.completions.create
        ask(model=MODEL, prompt=prompts, extra_body={"ignore_eos": True}, **more)

    def ask_known(self) -> None:
        starts = self.chance.choices(range(len(self.known) - PROMPT_LEN), k=AT_ONCE)
        self.ask([self.known[at : at + PROMPT_LEN] for at in starts], 0.0)

    def ask_noise(self) -> None:
        tokens = range(16, max(self.known))
        prompts = [self.chance.choices(tokens, k=PROMPT_LEN) for _ in range(AT_ONCE)]
        self.ask(prompts, 2.0)

    def ask_until(
        self, ask: Callable[[], None], name: str, is_enough: Callable[[float], bool]
    ) -> None:
        """Calls `ask` until `is_enough` is true of a metric."""
        deadline = time.monotonic() + LONGEST
        while not is_enough(found := self.server.metrics()[name]):
            assert time.monotonic() < deadline, f"{name} is {found}"
            ask()


@pytest.mark.slow
def test_falling_acceptance_is_logged_once(server, held_out_tokens):
    client = Client(server, held_out_tokens)
    assert isnan(server.metrics()[GAUGE])

    client.ask_until(client.ask_known, DRAFTS, lambda number: number > USUAL)
    assert server.metrics()[GAUGE] > 0.9 and LINE not in server.log.read_text()

    client.ask_until(client.ask_noise, GAUGE, lambda relative: relative < 0.7)
    (line,) = (x for x in server.log.read_text().splitlines() if LINE in x)
    assert "is usual, of drafts of" in line and "models/pard" in line

    client.ask_until(client.ask_known, GAUGE, lambda relative: relative > 0.9)
    assert server.log.read_text().count(LINE) == 1
