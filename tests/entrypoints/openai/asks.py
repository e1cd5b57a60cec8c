# SPDX-License-Identifier: Apache-2.0
"""What clients ask, and what the target alone would have answered."""

import random
from bisect import bisect_left
from dataclasses import dataclass
from typing import Any

import torch
from transformers import RepetitionPenaltyLogitsProcessor

from tests.v1.e2e.noise import noised


@dataclass(frozen=True)
class Answer:
    """The target alone on one prompt, past any end of text.

    Attributes:
        gaps: by how much the best logprob exceeds the second, for each of `tokens`.
        sampling: keys of a request, with which they are that.
    """

    prompt: list[int]
    tokens: list[int]
    gaps: list[float]
    sampling: dict[str, Any]


@torch.inference_mode()
def answer_alone(
    target: torch.nn.Module, prompt: list[int], sampling: dict[str, Any], count: int
) -> Answer:
    """So many tokens, past any end of text, in plain PyTorch."""
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
    """One request, and when its client leaves.

    Attributes:
        stop, stop_token: of the answer, at which it must end.
        leave_after_s: the connection is closed then, whatever has come.
    """

    answer: Answer
    max_tokens: int
    ignore_eos: bool
    is_stream: bool
    stop: str | None = None
    stop_token: int | None = None
    leave_after_s: float | None = None

    def body(self) -> dict[str, Any]:
        """What the client of OpenAI takes."""
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
    """Draws requests.

    Args:
        tokenizer: a tokenizer of transformers, the target's.
        leaving: share of clients that leave before their answer is whole.
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
        """Some characters out of the answer, wherever tokens begin and end."""
        text = self.text(tokens)
        if not text.isascii() or len(text) < 4:
            return None  # bytes of a character may stand in several tokens
        begin = self.random.randrange(len(text) - 3)
        return text[begin : begin + self.random.randint(1, 8)]

    def expected(self, ask: Ask) -> tuple[list[int], str]:
        """Token ids and text of the whole answer."""
        tokens = ask.answer.tokens[: ask.max_tokens]
        ends = {ask.stop_token, None if ask.ignore_eos else self.tokenizer.eos_token_id}
        is_end = [token in ends for token in tokens]
        if any(is_end):  # whose text is left out
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
