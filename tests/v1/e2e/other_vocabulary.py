# SPDX-License-Identifier: Apache-2.0
"""Draft models with other token ids, and partly other tokens, than the target."""

import json
import random
import shutil
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file

from tests.checkpoints.tensors import EMBED, write_checkpoint
from tests.checkpoints.words import save_words

# Tokens that the target lacks. They have the largest logits, but must not be drafted.
NUM_OWN, OWN_GAIN = 40, 8.0
EOS = "<|eos|>"


class OtherVocabulary(NamedTuple):
    folder: Path
    ids: list[int | None]  # by token of the target; None: the drafter lacks it


def with_other_vocabulary(
    drafter: Path, target: Path, folder: Path, lacks_every: int | None = None
) -> OtherVocabulary:
    """A copy of a bundled draft model, with `NUM_OWN` additional tokens, that lacks one
    in so many of the target's."""
    config = json.loads((drafter / "config.json").read_text())
    number = config["vocab_size"]
    every = range(number + NUM_OWN)
    ids = random.Random(0).sample(every, number)
    own = sorted(set(every).difference(ids))
    lacked = {t for t in range(3, number) if lacks_every and t % lacks_every == 0}
    words = {f"own {token}": token for token in own}
    for word, token in spelt_tokens(target).items():
        words[f"lacked {token}" if token in lacked else word] = ids[token]

    config["vocab_size"] = len(every)
    for key in ("bos_token_id", "eos_token_id", "pard_token"):
        if config.get(key) is not None:
            config[key] = ids[config[key]]
    write_checkpoint(folder, config, renumbered(drafter, ids, own))
    for warp in drafter.glob("warp_model.bin"):
        shutil.copy(warp, folder)
    save_words(words, EOS, folder)
    told = [None if token in lacked else new for token, new in enumerate(ids)]
    return OtherVocabulary(folder, told)


def spelt_tokens(model: Path) -> dict[str, int]:
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    added = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    return tokenizer["model"]["vocab"] | added


def renumbered(
    drafter: Path, ids: list[int], own: list[int]
) -> dict[str, torch.Tensor]:
    """A model's tensors with its tokens at `ids`, and likelier ones at `own`."""
    tensors = load_file(drafter / "model.safetensors")
    for name, rows in tensors.items():
        if "embed_tokens" in name or "lm_head" in name:
            tensors[name] = rows.new_empty(len(ids) + len(own), rows.shape[1])
            tensors[name][ids] = rows
            tensors[name][own] = OWN_GAIN * rows[40 : 40 + len(own)]
    return tensors


def in_target_ids(drafter: Path, other: OtherVocabulary, folder: Path) -> Path:
    """The bundled draft model, such that it drafts as the other one.

    Tokens that the other lacks are fed as its EOS, and never drafted.
    """
    shutil.copytree(drafter, folder)
    config = json.loads((drafter / "config.json").read_text())
    tensors = load_file(drafter / "model.safetensors")
    lacked = [token for token, own in enumerate(other.ids) if own is None]
    tensors.setdefault("lm_head.weight", tensors[EMBED].clone())
    tensors["lm_head.weight"][lacked] = 0  # the best logit is above 0
    tensors[EMBED][lacked] = tensors[EMBED][config["eos_token_id"]].clone()
    return write_checkpoint(folder, config | {"tie_word_embeddings": False}, tensors)
