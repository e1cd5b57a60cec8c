# SPDX-License-Identifier: Apache-2.0
"""The prompts of the speculative decoding example, as token ids."""

import argparse
import json
import random
import sysconfig
from collections.abc import Iterator
from itertools import chain, islice, zip_longest
from pathlib import Path
from typing import Any

# A token of source text is rarely longer, so this bounds what has to be tokenized.
CHARACTERS_PER_TOKEN = 16
# Columns that hold the prompt in well-known datasets, in order of preference.
PROMPT_COLUMNS = ("prompt", "question", "instruction", "turns", "text")


class PromptError(ValueError):
    """No prompts can be had; the message says what to change."""


def add_prompt_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("prompts")
    group.add_argument(
        "--dataset-name",
        choices=tuple(DATASETS),
        default="stdlib",
        help="stdlib: pieces of the running Python's library that the bundled models "
        "were not trained on; custom: JSON lines with a 'prompt' each; text: pieces "
        "of a plain text; sharegpt: its JSON file; hf: a Hugging Face dataset "
        "(default: %(default)s)",
    )
    group.add_argument(
        "--dataset-path", help="file of the dataset, or a Hugging Face dataset's id"
    )
    group.add_argument("--hf-split", default="train", help="split of an hf dataset")
    group.add_argument("--hf-subset", help="subset of an hf dataset")
    group.add_argument(
        "--prompt-len",
        type=int,
        default=128,
        help="tokens of each piece, for stdlib and text (default: %(default)s)",
    )
    group.add_argument(
        "--skip-chat-template",
        action="store_true",
        help="give prompts of custom, sharegpt and hf to the model as they are",
    )


def check_prompt_flags(args: argparse.Namespace) -> None:
    """Raises PromptError for what can be seen without a tokenizer."""
    name, path = args.dataset_name, args.dataset_path
    if args.prompt_len < 1:
        raise PromptError("--prompt-len: give a whole number from 1.")
    if name == "stdlib":
        if path:
            raise PromptError("--dataset-path needs --dataset-name custom, text or hf.")
        return
    if not path:
        raise PromptError(f"--dataset-name {name} needs --dataset-path.")
    if name != "hf" and not Path(path).is_file():
        raise PromptError(f"--dataset-path: there is no file {path}.")


def load_prompts(
    args: argparse.Namespace, held_out: Path, tokenizer: Any
) -> list[list[int]]:
    """At most `args.num_prompts` prompts; the same ones for the same seed.

    Args:
        args: parsed flags of the example.
        held_out: JSON list of the library modules that stdlib prompts are made of.
        tokenizer: the target's, as transformers gives it.
    """
    rng = random.Random(args.seed)
    prompts = list(DATASETS[args.dataset_name](args, held_out, tokenizer, rng))
    if not prompts:
        raise PromptError(
            f"--dataset-name {args.dataset_name}: no prompt found; "
            "give another --dataset-path, or a smaller --prompt-len."
        )
    return prompts


def _from_stdlib(
    args: argparse.Namespace, held_out: Path, tokenizer: Any, rng: random.Random
) -> Iterator[list[int]]:
    if not held_out.is_file():
        raise PromptError(f"There is no {held_out}: name a --dataset-name.")
    texts = [
        text for name in json.loads(held_out.read_text()) if (text := source(name))
    ]
    return _pieces(texts, args, tokenizer, rng)


def source(module: str) -> str | None:
    """Source of a library module; None where this Python does not have it."""
    path = Path(sysconfig.get_path("stdlib"), *module.split("."))
    for file in (path.with_suffix(".py"), path / "__init__.py"):
        if file.is_file():
            return file.read_text(encoding="utf-8")
    return None


def _from_text(
    args: argparse.Namespace, _: Path, tokenizer: Any, rng: random.Random
) -> Iterator[list[int]]:
    return _pieces([_read(args.dataset_path)], args, tokenizer, rng)


def _pieces(
    texts: list[str], args: argparse.Namespace, tokenizer: Any, rng: random.Random
) -> Iterator[list[int]]:
    """Pieces of exactly `--prompt-len` tokens, taking the texts in turn."""
    rng.shuffle(texts)
    turns = zip_longest(*[_starting_at_lines(text, args, rng) for text in texts])
    pieces = (tokenizer(text)["input_ids"] for text in chain(*turns) if text)
    long_enough = (ids for ids in pieces if len(ids) >= args.prompt_len)
    return (ids[: args.prompt_len] for ids in islice(long_enough, args.num_prompts))


def _starting_at_lines(
    text: str, args: argparse.Namespace, rng: random.Random
) -> list[str]:
    """Stretches of the text from random lines that are not indented."""
    lines = text.splitlines(keepends=True)
    starts, at = [], 0
    for line in lines:
        if not line[0].isspace():
            starts.append(at)
        at += len(line)
    rng.shuffle(starts)
    size = args.prompt_len * CHARACTERS_PER_TOKEN
    return [text[start : start + size] for start in starts]


def _from_json_lines(
    args: argparse.Namespace, _: Path, tokenizer: Any, rng: random.Random
) -> Iterator[list[int]]:
    lines = [line for line in _read(args.dataset_path).splitlines() if line.strip()]
    rows = (_parsed(line, args.dataset_path) for line in lines)
    return _tokenized([_prompt_of(row) for row in rows], args, tokenizer, rng)


def _from_sharegpt(
    args: argparse.Namespace, _: Path, tokenizer: Any, rng: random.Random
) -> Iterator[list[int]]:
    rows = _parsed(_read(args.dataset_path), args.dataset_path)
    try:
        texts = [
            row["conversations"][0]["value"] for row in rows if row.get("conversations")
        ]
    except (KeyError, TypeError, AttributeError) as error:
        raise PromptError(f"{args.dataset_path} is not a ShareGPT file.") from error
    return _tokenized(texts, args, tokenizer, rng)


def _from_hugging_face(
    args: argparse.Namespace, _: Path, tokenizer: Any, rng: random.Random
) -> Iterator[list[int]]:
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise PromptError(
            "--dataset-name hf needs the package 'datasets': `pip install datasets`, "
            "or give a file with --dataset-name custom."
        ) from error
    rows = load_dataset(args.dataset_path, args.hf_subset, split=args.hf_split)
    return _tokenized([_prompt_of(row) for row in rows], args, tokenizer, rng)


def _prompt_of(row: Any) -> str:
    columns = row if isinstance(row, dict) else {}
    for name in PROMPT_COLUMNS:
        if value := columns.get(name):
            return value if isinstance(value, str) else value[0]
    raise PromptError(
        f"A row has the columns {', '.join(columns) or 'none'}: "
        f"one of {', '.join(PROMPT_COLUMNS)} must hold the prompt."
    )


def _tokenized(
    texts: list[str], args: argparse.Namespace, tokenizer: Any, rng: random.Random
) -> Iterator[list[int]]:
    rng.shuffle(texts)
    templated = not args.skip_chat_template and tokenizer.chat_template
    encode = _chat if templated else lambda text, tok: tok(text)["input_ids"]
    return (encode(text, tokenizer) for text in texts[: args.num_prompts])


def _chat(text: str, tokenizer: Any) -> list[int]:
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": text}], add_generation_prompt=True, tokenize=False
    )
    # The template writes the special tokens itself.
    return tokenizer(chat, add_special_tokens=False)["input_ids"]


def _read(path: str) -> str:
    return Path(path).read_text(encoding="utf-8")


def _parsed(text: str, path: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise PromptError(f"{path} is not valid JSON: {error}.") from error


DATASETS = {
    "stdlib": _from_stdlib,
    "custom": _from_json_lines,
    "text": _from_text,
    "sharegpt": _from_sharegpt,
    "hf": _from_hugging_face,
}
