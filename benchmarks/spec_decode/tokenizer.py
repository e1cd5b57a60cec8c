# SPDX-License-Identifier: Apache-2.0
"""A tokenizer for shapes without one, in which every token is a word."""

import json
from pathlib import Path


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """Writes tokenizer.json: token i is the word "t<i>", words stand between spaces."""
    words = {f"t{token}": token for token in range(vocab_size)}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "t0"},
    }
    none = dict.fromkeys(
        ("truncation", "padding", "normalizer", "post_processor", "decoder")
    )
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer | none))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "t0"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
