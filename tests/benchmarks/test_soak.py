# SPDX-License-Identifier: Apache-2.0
"""The soak: what it expects, and that it finds out a server that answers wrongly."""

import asyncio
import json
from typing import Any

import pytest
from aiohttp import web

from benchmarks.spec_decode.soak.__main__ import FIGURES, faults, growth, later
from benchmarks.spec_decode.soak.asks import Answer, Ask, Asks, Verdict, compare
from benchmarks.spec_decode.soak.clients import Traffic
from benchmarks.spec_decode.soak.table import soak_table

END = 0
ANSWER = Answer([7], [5, 3, END, 9, 1], [2.0, 0.01, 2.0, 2.0, 2.0])


class Letters:
    """A tokenizer whose tokens are letters of two bytes each, the end without text."""

    eos_token_id = END

    def decode(self, tokens: list[int], skip_special_tokens: bool) -> str:
        assert skip_special_tokens
        return "".join(chr(ord("a") + t) * 2 for t in tokens if t != END)


@pytest.fixture
def asks() -> Asks:
    return Asks([ANSWER], Letters(), leaving=0.0, seed=0)


def ask(**changes: Any) -> Ask:
    given = {"max_tokens": 5, "ignore_eos": True, "is_stream": False} | changes
    return Ask(ANSWER, **given)


@pytest.mark.parametrize(
    "changes, tokens, text",
    [
        ({}, [5, 3, END, 9, 1], "ffddjjbb"),
        ({"max_tokens": 1}, [5], "ff"),
        ({"ignore_eos": False}, [5, 3, END], "ffdd"),
        ({"stop": "dj"}, [5, 3, END, 9], "ffd"),
        ({"stop": "f"}, [5], ""),
        ({"stop": "x"}, [5, 3, END, 9, 1], "ffddjjbb"),
        ({"stop": "j", "ignore_eos": False}, [5, 3, END], "ffdd"),
    ],
)
def test_expected_answer(asks: Asks, changes, tokens, text):
    assert asks.expected(ask(**changes)) == (tokens, text)


@pytest.mark.parametrize(
    "found, is_whole, verdict",
    [
        ([5, 3, 0, 9, 1], True, Verdict()),
        ([5, 3], False, Verdict()),
        ([5, 3], True, Verdict(wrong=3)),
        ([5, 3, 0, 9, 1, 1], False, Verdict(wrong=1)),
        ([5, 3, 0, 8, 1], True, Verdict(wrong=2)),
        ([5, 4, 4, 4], False, Verdict(after_tie=3)),
        ([], False, Verdict()),
    ],
)
def test_comparison(found, is_whole, verdict):
    assert compare(found, ANSWER.tokens, ANSWER.gaps, is_whole, 0.1) == verdict


def test_draws_are_of_every_kind_and_repeat():
    drawn = []
    for _ in range(2):
        asks = Asks([ANSWER], Letters(), leaving=0.5, seed=3)
        drawn.append([asks.draw() for _ in range(300)])
    assert drawn[0] == drawn[1]
    assert {one.max_tokens for one in drawn[0]} == {1, 2, 3, 4, 5}
    for name in ("is_stream", "ignore_eos", "stop"):
        assert len({getattr(one, name) for one in drawn[0]}) >= 2
    assert any(one.leave_after_tokens for one in drawn[0])
    assert any(one.leave_after_s for one in drawn[0])
    assert all(one.is_stream for one in drawn[0] if one.leave_after_tokens)


class Fake:
    """A server that answers from the asks themselves, but for one fault."""

    def __init__(self, asks: Asks, fault: str):
        self.asks, self.fault = asks, fault

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        names = ("max_tokens", "ignore_eos", "stop")
        wanted = ask(**{name: body[name] for name in names})
        tokens, text = self.asks.expected(wanted)
        if self.fault == "token":
            tokens = [*tokens[:-1], 8]
        if self.fault == "text":
            text += "!"
        if self.fault == "refusal":
            return web.Response(status=500)
        if not body["stream"]:
            return web.json_response({"choices": [{"text": text, "token_ids": tokens}]})
        return await self._stream(request, tokens, text)

    async def _stream(self, request, tokens, text) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for number, token in enumerate(tokens):
            choice = {"text": "" if number else text, "token_ids": [token]}
            line = f"data: {json.dumps({'choices': [choice]})}\n\n"
            await response.write(line.encode())
        if self.fault != "cut":
            await response.write(b"data: [DONE]\n\n")
        return response


async def traffic_at(fake: Fake) -> Traffic:
    app = web.Application()
    app.router.add_post("/v1/completions", fake.complete)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = site._server.sockets[0].getsockname()[1]
    traffic = Traffic(f"http://127.0.0.1:{port}", fake.asks, tie=0.001)
    await traffic.round(4, 0.3, leave=False)
    await runner.cleanup()
    return traffic


@pytest.mark.parametrize(
    "fault, counted",
    [
        ("", None),
        ("token", "wrong_tokens"),
        ("text", "wrong_tokens"),
        ("refusal", "errors"),
        ("cut", "errors"),
    ],
)
def test_a_server_that_errs_is_found_out(fault: str, counted: str | None):
    asks = Asks([ANSWER], Letters(), leaving=0.3, seed=1)
    traffic = asyncio.run(traffic_at(Fake(asks, fault)))
    assert traffic.counts["requests"] >= 4
    bad = {n for n in ("wrong_tokens", "errors") if traffic.counts[n]}
    assert bad == ({counted} if counted else set())
    assert bool(traffic.complaints) == bool(counted)


def soaked(**changes: Any) -> dict[str, Any]:
    found = dict.fromkeys((*FIGURES, "preemptions", "prefix_cache_hits"), 5)
    found |= dict.fromkeys(("wrong_answers", "wrong_tokens", "errors"), 0)
    found |= {"stuck_requests": 0, "leaked_blocks": 0}
    found |= {"rss_growth_bytes": 500, "gpu_growth_bytes": None}
    found |= {"rss_late_growth_bytes": 50, "gpu_late_growth_bytes": None}
    return found | changes


@pytest.mark.parametrize(
    "changes, says",
    [
        ({"wrong_tokens": 2}, "2 wrong_tokens"),
        ({"errors": 1}, "1 errors"),
        ({"leaked_blocks": 3}, "3 leaked_blocks"),
        ({"stuck_requests": 1}, "1 stuck_requests"),
        ({"rss_late_growth_bytes": 101}, "rss_late_growth_bytes is 101"),
        ({"gpu_late_growth_bytes": 101}, "gpu_late_growth_bytes is 101"),
        ({"preemptions": 0}, "no preemptions"),
        ({"aborted": 0}, "no aborted"),
    ],
)
def test_faults(changes, says):
    assert faults(soaked(), max_growth=100) == []
    assert faults(soaked(**changes), max_growth=100) == [says]


def test_growth_is_from_the_first_idle_moment_to_the_last():
    moments = [{"rss_bytes": n, "gpu_bytes": None} for n in (100, 400, 130)]
    assert growth(moments, "rss_bytes") == 30
    assert growth(moments, "gpu_bytes") is None
    assert growth(later(moments), "rss_bytes") == -270
    assert later(moments[:2]) == moments[:2]
    assert len(later(moments + moments[:2])) == 3


def test_table():
    about = {"dtype": "float32", "seconds": 9.6, "clients": 64}
    found = soaked(**about, acceptance_length=3.0, rss_growth_bytes=3 << 20)
    (row,) = [line for line in soak_table({"pard": found}).splitlines() if "PA" in line]
    assert row.split(" | ")[2:4] == ["10", "64"]
    assert row.endswith("| +3 | +0 | – | 3.00 |")
    assert soak_table({}) == ""
