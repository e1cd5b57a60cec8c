# SPDX-License-Identifier: Apache-2.0
"""The prompts: a dataset of vLLM's, or a small set that needs no download."""

import argparse
import json
import random
import sysconfig
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any, NamedTuple

from vllm.benchmarks.datasets import SampleRequest, get_samples

PROMPT_LEN = 128
# On a CPU a prompt token takes as long as an output token, not a hundredth of it.
BUNDLED_PROMPT_LEN = 32
PROMPTS = (
    "Explain to a child why the sky is blue.",
    "Write a Python function that merges two sorted lists, with a docstring.",
    "A train leaves at 9:40 and arrives at 13:05. How long does it take? Show steps.",
    "Translate into French: The meeting was moved to Thursday because of the strike.",
    "Summarise the plot of Romeo and Juliet in five sentences.",
    "Write a polite e-mail that asks a landlord to repair the heating.",
    "Write a SQL query for the three best customers by revenue of the last year.",
    "Compare nuclear and solar power by cost, safety and land use, in a table.",
)


class Request(NamedTuple):
    prompt: list[int]
    max_tokens: int


def read_requests(
    args: argparse.Namespace, tokenizer: Any, bundle: Path | None, vocab_size: int
) -> list[Request]:
    """The requests, `args.num_prompts` in number.

    Args:
        tokenizer: None: prompts are random tokens.
        bundle: folder of the bundled models, whose target writes only Python.

    Raises:
        ValueError: a dataset has no text.
    """
    if args.dataset_name is not None:
        samples = get_samples(args, tokenizer)
        return [_request(args, tokenizer, sample) for sample in samples]
    if tokenizer is None:
        chance = random.Random(args.seed)
        texts = [chance.choices(range(vocab_size), k=PROMPT_LEN) for _ in PROMPTS]
    elif bundle is not None:
        # Else transformers warns of texts that are too long, which are cut here.
        encode = partial(tokenizer.encode, verbose=False)
        texts = [encode(text)[:BUNDLED_PROMPT_LEN] for text in _held_out(bundle)]
    else:
        texts = [_as_chat(tokenizer, text) for text in PROMPTS]
    few = islice(cycle(texts), args.num_prompts)
    return [Request(text, args.output_len) for text in few]


def _request(
    args: argparse.Namespace, tokenizer: Any, sample: SampleRequest
) -> Request:
    if sample.multi_modal_data or not isinstance(sample.prompt, str):
        raise ValueError(
            f"--dataset-name {args.dataset_name}: only prompts of text are compared; "
            "choose another dataset."
        )
    prompt = tokenizer.encode(sample.prompt)
    return Request(prompt, args.output_len or sample.expected_output_len)


def _as_chat(tokenizer: Any, text: str) -> list[int]:
    if not getattr(tokenizer, "chat_template", None):
        return tokenizer.encode(text)
    asked = [{"role": "user", "content": text}]
    chat = tokenizer.apply_chat_template(
        asked, tokenize=False, add_generation_prompt=True
    )
    return tokenizer.encode(chat, add_special_tokens=False)


def _held_out(bundle: Path) -> list[str]:
    """Modules of Python that the target was not trained on, each from a method on."""
    folder = Path(sysconfig.get_path("stdlib"))
    names = json.loads((bundle / "held_out.json").read_text())
    files = [folder / f"{name.replace('.', '/')}.py" for name in names]
    texts = [file.read_text() for file in files if file.is_file()]
    return [text[text.find("    def ") :] for text in texts]
