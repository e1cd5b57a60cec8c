# SPDX-License-Identifier: Apache-2.0
"""The prompts: a dataset of vLLM's, or a small set that needs no download."""

import argparse
import json
import random
import sysconfig
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from vllm.benchmarks.datasets import get_samples

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


def read_prompts(
    args: argparse.Namespace, tokenizer: Any, bundle: Path | None, vocab_size: int
) -> list[list[int]]:
    """Token ids of `args.num_prompts` prompts.

    Args:
        tokenizer: None: prompts are random tokens.
        bundle: folder of the bundled models, whose target writes only Python.

    Raises:
        ValueError: a dataset has no text.
    """
    if args.dataset_name is not None:
        samples = get_samples(args, tokenizer)
        if any(s.multi_modal_data or not isinstance(s.prompt, str) for s in samples):
            raise ValueError(
                f"--dataset-name {args.dataset_name}: only prompts of text are "
                "compared; choose another dataset."
            )
        return [tokenizer.encode(sample.prompt) for sample in samples]
    if tokenizer is None:
        rng = random.Random(args.seed)
        prompts = [rng.choices(range(vocab_size), k=PROMPT_LEN) for _ in PROMPTS]
    elif bundle is not None:
        # Else transformers warns of texts that are too long, which are cut here.
        texts = [tokenizer.encode(text, verbose=False) for text in held_out(bundle)]
        prompts = [text[:BUNDLED_PROMPT_LEN] for text in texts]
    else:
        prompts = [encode_chat(tokenizer, text) for text in PROMPTS]
    return list(islice(cycle(prompts), args.num_prompts))


def encode_chat(tokenizer: Any, text: str) -> list[int]:
    if not getattr(tokenizer, "chat_template", None):
        return tokenizer.encode(text)
    messages, how = [{"role": "user", "content": text}], {"tokenize": False}
    chat = tokenizer.apply_chat_template(messages, add_generation_prompt=True, **how)
    return tokenizer.encode(chat, add_special_tokens=False)


def held_out(bundle: Path) -> list[str]:
    """Modules of Python that the target was not trained on, each from a method on."""
    folder = Path(sysconfig.get_path("stdlib"))
    names = json.loads((bundle / "held_out.json").read_text())
    files = [folder / f"{name.replace('.', '/')}.py" for name in names]
    texts = [file.read_text() for file in files if file.is_file()]
    return [text[text.find("    def ") :] for text in texts]
