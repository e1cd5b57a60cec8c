# SPDX-License-Identifier: Apache-2.0
"""Random client requests, and the target's own answers to them."""

import random
from bisect import bisect_left
from dataclasses import dataclass
from typing import Any

import torch
from transformers import RepetitionPenaltyLogitsProcessor

from tests.v1.e2e.noise import noised


@dataclass(frozen=True)
class Answer:
    """What the target alone generates for a prompt, ignoring EOS.

    Attributes:
        gaps: by how much the best logprob exceeds the second, for each of `tokens`.
        sampling: the request's sampling parameters.
    """

    prompt: list[int]
    tokens: list[int]
    gaps: list[float]
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
    """One request, and when its client disconnects.

    Attributes:
        stop, stop_token: parts of the answer at which it must end.
        leave_after_s: time after which the client disconnects; None: never.
    """

    answer: Answer
    max_tokens: int
    ignore_eos: bool
    is_stream: bool
    stop: str | None = None
    stop_token: int | None = None
    leave_after_s: float | None = None

    def body(self) -> dict[str, Any]:
        """Arguments for the OpenAI client."""
        more = {"ignore_eos": self.ignore_eos, "return_token_ids": True}
        if self.stop_token is not None:
            more["stop_token_ids"] = [self.stop_token]
        return {
            "prompt": self.answer.prompt,
            "max_tokens": self.max_tokens,
            "stream": self.is_stream,
            "stop": self.stop,
            "extra_body": more | self.answer.sampling,
        }


class Asks:
    """Draws random requests.

    Args:
        tokenizer: the target's tokenizer, from transformers.
        leaving: share of clients that may disconnect before their answer is complete.
    """

    def __init__(
        self, answers: list[Answer], tokenizer: Any, leaving: float, seed: int
    ):
        self.answers, self.tokenizer, self.leaving = answers, tokenizer, leaving
        self.random = random.Random(seed)

    def text(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=True)

    def draw(self) -> Ask:
        draw = self.random
        answer = draw.choice(self.answers)
        longest = len(answer.tokens)
        max_tokens = 1 if draw.random() < 0.05 else draw.randint(2, longest)
        is_leaving = draw.random() < self.leaving
        return Ask(
            answer,
            max_tokens,
            ignore_eos=draw.random() < 0.5,
            is_stream=draw.random() < 0.6,
            stop=self._stop(answer.tokens) if draw.random() < 0.3 else None,
            stop_token=draw.choice(answer.tokens) if draw.random() < 0.2 else None,
            leave_after_s=10 ** draw.uniform(-2, 0.5) if is_leaving else None,
        )

    def _stop(self, tokens: list[int]) -> str | None:
        """A random substring of the answer, regardless of token boundaries."""
        text = self.text(tokens)
        if not text.isascii() or len(text) < 4:
            return None  # bytes of a character may be split across tokens
        begin = self.random.randrange(len(text) - 3)
        return text[begin : begin + self.random.randint(1, 8)]

    def expected(self, ask: Ask) -> tuple[list[int], str]:
        """Token ids and text of the complete answer."""
        tokens = ask.answer.tokens[: ask.max_tokens]
        ends = {ask.stop_token, None if ask.ignore_eos else self.tokenizer.eos_token_id}
        is_end = [token in ends for token in tokens]
        if any(is_end):  # the text of an end token is not returned
            tokens = tokens[: is_end.index(True) + 1]
        text = self.text(tokens[:-1] if any(is_end) else tokens)
        if ask.stop and ask.stop in text:
            count = bisect_left(
                range(len(tokens)),
                True,
                key=lambda n: ask.stop in self.text(tokens[:n]),
            )
            return tokens[:count], text[: text.index(ask.stop)]
        return tokens, text
