# SPDX-License-Identifier: Apache-2.0
"""Text that the model writes: drafts are accepted if they are what it would write."""

import ast
import random
import sysconfig
from collections.abc import Iterator
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoTokenizer

from vllm import LLM, SamplingParams

from .questions import COMPLETE, HeldOut, held_out, rows

# Beginnings of questions on code, which the model ends.
STEMS = (
    "Write a Python function that", "Write a Python class", "Write a Python program to",
    "Write code that", "Fix the bug in this Python code:\n", "Explain this code:\n",
    COMPLETE.format("def "), "Write a SQL query", "How do I", "Implement",
)  # fmt: skip
# Shares of the texts; the others answer what the model asks from an empty turn on.
GSM8K, STDLIB, RAW, STEM = 0.25, 0.12, 0.08, 0.1
TEMPERATURES = 0.0, 0.0, 0.7, 1.0
STDLIB_FILES, OTHERS = 500, {"site-packages", "dist-packages", "test", "tests"}
QUESTION_TOKENS = 128
MAX_MODEL_LEN = 1024


class Writer:
    """The model, which writes questions and answers.

    Args:
        engine: arguments of `LLM`.
    """

    def __init__(self, model: Path, engine: dict[str, Any], seed: int):
        self.random = random.Random(seed)
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        self.llm = LLM(str(model), max_model_len=MAX_MODEL_LEN, seed=seed, **engine)
        chat = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": "\0"}],
            add_generation_prompt=True,
            tokenize=False,
        )
        self.before, self.after = map(self.encode, chat.split("\0"))

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def chat(self, question: str) -> list[int]:
        return self.before + self.encode(question) + self.after

    def write(
        self, prompts: list[list[int]], temperatures: list[float], tokens: int
    ) -> Iterator[tuple[list[int], list[int], bool]]:
        """Yields prompt, answer and whether the model ended it."""
        sampling = [
            SamplingParams(temperature=t, max_tokens=tokens, detokenize=False)
            for t in temperatures
        ]
        inputs = [{"prompt_token_ids": ids} for ids in prompts]
        answers = self.llm.generate(inputs, sampling, use_tqdm=False)
        for prompt, answer in zip(prompts, answers, strict=True):
            (output,) = answer.outputs
            yield prompt, list(output.token_ids), output.finish_reason == "stop"

    def own_questions(self, count: int, stems: tuple[str, ...]) -> list[list[int]]:
        """Prompts: the model continues user turns that begin with a stem."""
        starts = [self.before + self.encode(self._pick(stems)) for _ in range(count)]
        asked = self.write(starts, [1.0] * count, QUESTION_TOKENS)
        # The end of the turn is the model's last token, and the first of `after`.
        return [start + ids[:-1] + self.after for start, ids, ended in asked if ended]

    def prompts(self, questions: Path, count: int) -> list[list[int]]:
        """About `count` prompts of all kinds, shuffled."""
        gsm8k = [row["question"] for row in rows(questions, "gsm8k_train")]
        code = list(stdlib_functions(self.random))
        raw = [self.encode(self._pick(code)) for _ in range(round(count * RAW))]
        asked = [self._pick(gsm8k) for _ in range(round(count * GSM8K))]
        asked += [COMPLETE.format(self._pick(code)) for _ in range(int(count * STDLIB))]
        found = [ids for ids in map(self.chat, asked) if len(ids) < MAX_MODEL_LEN // 2]
        found += [ids[: MAX_MODEL_LEN // 2] for ids in raw]
        found += self.own_questions(round(count * STEM), STEMS)
        found += self.own_questions(max(0, count - len(found)), ("",))
        self.random.shuffle(found)
        return found

    def _pick(self, texts: Any) -> str:
        return self.random.choice(texts)


def stdlib_functions(chance: random.Random) -> Iterator[str]:
    """Heads of functions with their docstrings, of some of the standard library."""
    paths = sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py"))
    own = [path for path in paths if not OTHERS & set(path.parts)]
    for path in chance.sample(own, min(len(own), STDLIB_FILES)):
        with suppress(SyntaxError, UnicodeDecodeError):
            text = path.read_text()
            lines = text.splitlines(keepends=True)
            for node in ast.parse(text).body:
                if isinstance(node, ast.FunctionDef) and ast.get_docstring(node):
                    yield "".join(lines[node.lineno - 1 : node.body[0].end_lineno])


def write_text(
    model: Path,
    questions: Path,
    out: Path,
    samples: int,
    part: int,
    tokens: int,
    engine: dict[str, Any],
) -> None:
    """Writes `text-PART.safetensors`: ids of all texts, lengths, and what was asked."""
    to_test = list(held_out(questions))
    writer = Writer(model, engine, seed=part)
    unseen = HeldOut(map(writer.encode, to_test))
    prompts = writer.prompts(questions, samples)
    temperatures = writer.random.choices(TEMPERATURES, k=len(prompts))
    written = writer.write(prompts, temperatures, tokens)
    texts = [
        (prompt + answer, len(prompt))
        for prompt, answer, _ in written
        if not unseen.shares(prompt + answer)
    ]
    ids, asked = zip(*texts, strict=True)
    arrays = {"ids": list(chain(*ids)), "lengths": list(map(len, ids)), "asked": asked}
    print(
        f"part {part}: {len(texts)} texts, {len(arrays['ids'])} tokens, "
        f"{len(prompts) - len(texts)} left out that share a passage with a question "
        "to test on"
    )
    out.mkdir(parents=True, exist_ok=True)
    tensors = {name: torch.tensor(v, dtype=torch.int32) for name, v in arrays.items()}
    save_file(tensors, out / f"text-{part}.safetensors")
