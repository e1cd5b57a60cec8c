# SPDX-License-Identifier: Apache-2.0
"""Concurrent clients of a server, with random requests and the target's own answers."""

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import Any

import openai
import torch
from transformers import RepetitionPenaltyLogitsProcessor

from tests.v1.e2e.noise import noised

from .server import MODEL

LONGEST_PROMPT, LONGEST_OUTPUT = 120, 24
DRAIN_S = 300  # for the requests in flight when a round ends


@dataclass(frozen=True)
class Answer:
    """What the target alone generates for a prompt, ignoring EOS."""

    prompt: list[int]
    tokens: list[int]
    gaps: list[float]  # by how much the best logprob of each exceeds the second
    sampling: dict[str, Any]


@torch.inference_mode()
def answer_alone(
    target: torch.nn.Module, prompt: list[int], sampling: dict[str, Any], count: int
) -> Answer:
    """Generates `count` tokens in plain PyTorch, ignoring EOS."""
    penalise = RepetitionPenaltyLogitsProcessor(sampling.get("repetition_penalty", 1.0))
    tokens: list[int] = []
    gaps: list[float] = []
    for _ in range(count):
        text = torch.tensor([prompt + tokens])
        scores = penalise(text, target(text).logits[:, -1])[0]
        if "seed" in sampling:
            at = text.shape[1] - 1
            scores = torch.from_numpy(noised(scores, position=at, **sampling))
        best = scores.topk(2)
        tokens.append(int(best.indices[0]))
        gaps.append(float(best.values[0] - best.values[1]))
    return Answer(prompt, tokens, gaps, sampling)


@dataclass(frozen=True)
class Ask:
    """One request, the complete answer to it, and when its client disconnects."""

    body: dict[str, Any]  # arguments for the OpenAI client
    tokens: list[int]
    text: str
    gaps: list[float]  # see `Answer`
    leave_after_s: float | None = None  # None: never


class Asks:
    """Draws random requests; a share of clients, `leaving`, may disconnect early."""

    def __init__(self, answers: list[Answer], tokenizer: Any, leaving: float):
        self.answers, self.tokenizer, self.leaving = answers, tokenizer, leaving
        self.random = random.Random(0)

    def text_of(self, answer: Answer) -> str:
        """The text of a whole answer, up to EOS."""
        return self._expected({"ignore_eos": False}, answer.tokens)[1]

    def draw(self) -> Ask:
        draw = self.random
        answer = draw.choice(self.answers)
        leave = 10 ** draw.uniform(-2, 0.5) if draw.random() < self.leaving else None
        more: dict[str, Any] = {"ignore_eos": draw.random() < 0.5}
        if draw.random() < 0.4:
            more["stop_token_ids"] = [draw.choice(answer.tokens)]
        most = draw.randint(1, len(answer.tokens))
        body = {
            "prompt": answer.prompt,
            "max_tokens": most,
            "stream": draw.random() < 0.6,
            "extra_body": {"return_token_ids": True} | more | answer.sampling,
        }
        expected = self._expected(more, answer.tokens[:most])
        return Ask(body, *expected, answer.gaps, leave)

    def _expected(self, ends: dict, tokens: list[int]) -> tuple[list[int], str]:
        """Token ids and text of the complete answer, up to the first end token."""
        stops = {*ends.get("stop_token_ids", ())}
        if not ends["ignore_eos"]:
            stops.add(self.tokenizer.eos_token_id)
        is_end = [token in stops for token in tokens]
        if any(is_end):
            tokens = tokens[: is_end.index(True) + 1]
        # The text of an end token is not returned.
        told = tokens[:-1] if any(is_end) else tokens
        return tokens, self.tokenizer.decode(told, skip_special_tokens=True)


class Traffic:
    """Clients that send requests and check the answers, in rounds of some seconds.

    Logprobs of the target closer than `tie` are ties.
    """

    def __init__(self, url: str, asks: Asks, tie: float):
        self.url, self.asks, self.tie = url, asks, tie
        # Of requests, whole or aborted by the client, of tokens and tokens_after_ties.
        self.counts: Counter = Counter()
        self.complaints: list[str] = []  # the first wrong answers and errors

    async def round(self, num_clients: int, seconds: float, leave: bool) -> None:
        """Each client sends one request after the other until the time is over; then
        all leave, or wait for answers.

        Raises:
            TimeoutError: a request was never answered.
        """
        until = time.monotonic() + seconds
        async with openai.AsyncOpenAI(
            base_url=f"{self.url}/v1", api_key="none", timeout=None
        ) as client:
            clients = [self._client(client, until, leave) for _ in range(num_clients)]
            await asyncio.wait_for(asyncio.gather(*clients), seconds + DRAIN_S)

    async def _client(
        self, client: openai.AsyncOpenAI, until: float, leave: bool
    ) -> None:
        while (left := until - time.monotonic()) > 0:
            ask = self.asks.draw()
            if leave:
                patience = min(ask.leave_after_s or left, left)
                ask = replace(ask, leave_after_s=patience)
            try:
                await self._ask(client, ask)
            except openai.OpenAIError as error:
                self._complain(f"{type(error).__name__}: {error}")
                await asyncio.sleep(0.2)

    async def _ask(self, client: openai.AsyncOpenAI, ask: Ask) -> None:
        tokens: list[int] = []
        text, is_whole = "", True
        try:
            async with asyncio.timeout(ask.leave_after_s):
                async for choice in choices(client, ask.body):
                    tokens += choice.token_ids or []
                    text += choice.text
        except TimeoutError:
            is_whole = False
        self.counts["whole" if is_whole else "aborted"] += 1
        self.counts["tokens"] += len(tokens)
        # Of an aborted request, the tokens received must be a prefix.
        wanted = ask.tokens if is_whole else ask.tokens[: len(tokens)]
        same = [a == b for a, b in zip(tokens, wanted, strict=False)]
        if not all(same) and ask.gaps[same.index(False)] < self.tie:
            # A tie: matrix products of another shape round differently.
            self.counts["tokens_after_ties"] += len(tokens) - same.index(False)
        elif tokens != wanted or (is_whole and text != ask.text):
            self._complain(f"{ask}: {tokens} {text!r} is not the answer")

    def _complain(self, text: str) -> None:
        if len(self.complaints) < 5:
            self.complaints.append(text)


async def choices(
    client: openai.AsyncOpenAI, body: dict[str, Any]
) -> AsyncIterator[Any]:
    """The choices of all chunks, or the only choice of an answer without streaming."""
    found = await client.completions.create(model=MODEL, **body)
    if not body["stream"]:
        yield found.choices[0]
        return
    async for chunk in found:
        for choice in chunk.choices:
            yield choice
