# SPDX-License-Identifier: Apache-2.0
"""Tokenizers that only say which tokens there are."""

from collections.abc import Mapping
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast


def save_words(words: Mapping[str, int], eos: str, folder: Path) -> None:
    """Writes a tokenizer of these tokens, by their ids; `eos` ends a text."""
    PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(dict(words))), eos_token=eos
    ).save_pretrained(folder)
