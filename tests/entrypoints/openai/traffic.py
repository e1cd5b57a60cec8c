# SPDX-License-Identifier: Apache-2.0
"""Concurrent clients of one server, in rounds of some seconds."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import openai

from .asks import Ask, Asks
from .server import MODEL

DRAIN_S = 300  # for the requests in flight when a round ends


class Traffic:
    """Clients that send requests and check the answers.

    Args:
        tie: logprobs of the target closer than this are ties.

    Attributes:
        counts: numbers of requests, whole (complete answers), aborted (by the client),
            tokens and tokens_after_ties.
        complaints: the first wrong answers and errors, as text.
    """

    def __init__(self, url: str, asks: Asks, tie: float):
        self.url, self.asks, self.tie = url, asks, tie
        self.counts: Counter = Counter()
        self.complaints: list[str] = []

    async def round(self, num_clients: int, seconds: float, leave: bool) -> None:
        """Each client sends one request after the other until the time is over.

        Args:
            leave: whether all of them disconnect then, instead of waiting for answers.

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
            self.counts["requests"] += 1
            try:
                await self._ask(client, ask)
            except openai.OpenAIError as error:
                self._complain(f"{type(error).__name__}: {error}")
                await asyncio.sleep(0.2)

    async def _ask(self, client: openai.AsyncOpenAI, ask: Ask) -> None:
        tokens: list[int] = []
        text: list[str] = []
        try:
            async with asyncio.timeout(ask.leave_after_s):
                async for choice in answer(client, ask):
                    tokens += choice.token_ids or []
                    text.append(choice.text)
        except TimeoutError:
            self.counts["aborted"] += 1
            return self._judge(ask, tokens)
        self.counts["whole"] += 1
        self._judge(ask, tokens, "".join(text))

    def _judge(self, ask: Ask, tokens: list[int], text: str | None = None) -> None:
        """Compares with the target's answer; `text` is None for an aborted one."""
        self.counts["tokens"] += len(tokens)
        wanted, whole_text = self.asks.expected(ask)
        if text is None:  # the tokens received must be a prefix
            wanted = wanted[: len(tokens)]
        same = [a == b for a, b in zip(tokens, wanted, strict=False)]
        if not all(same) and ask.answer.gaps[same.index(False)] < self.tie:
            # A tie: matrix products of another shape round differently.
            self.counts["tokens_after_ties"] += len(tokens) - same.index(False)
        elif tokens != wanted or text not in (None, whole_text):
            self._complain(f"{ask}: {tokens} {text!r} is not {wanted} {whole_text!r}")

    def _complain(self, text: str) -> None:
        if len(self.complaints) < 5:
            self.complaints.append(text)


async def answer(client: openai.AsyncOpenAI, ask: Ask) -> AsyncIterator[Any]:
    """The choices of all chunks, or the only choice of an answer without streaming.

    Raises:
        openai.OpenAIError: the server refused the request, or is gone.
    """
    found = await client.completions.create(model=MODEL, **ask.body())
    if not ask.is_stream:
        yield found.choices[0]
        return
    async for chunk in found:
        for choice in chunk.choices:
            yield choice
