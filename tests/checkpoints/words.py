# SPDX-License-Identifier: Apache-2.0
"""Tokenizers that are only a vocabulary."""

from collections.abc import Mapping
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast


def save_words(words: Mapping[str, int], eos: str, folder: Path) -> None:
    """Writes a tokenizer with these tokens and ids; `eos` is its EOS token."""
    PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(dict(words))), eos_token=eos
    ).save_pretrained(folder)
