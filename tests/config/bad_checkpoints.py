# SPDX-License-Identifier: Apache-2.0
"""Drafters with broken files, or made for another target."""

from functools import partial
from pathlib import Path

import torch

from tests.checkpoints.quantized import quantize
from tests.checkpoints.words import save_words

from .bad_row import (
    CONFIG,
    GONE,
    WARP,
    WEIGHTS,
    Break,
    Row,
    config,
    edited_weights,
    file,
    removed,
    rotated,
    saved,
    tensors,
    truncated,
)

NUM_TOKENS = 2560  # of the bundled models
HTML = b"<!DOCTYPE html><html>Not found</html>"
PROJECTION = {"target_proj.weight": torch.zeros(192, 256)}
SAVED = saved(WARP, PROJECTION)
INDEX = WEIGHTS + ".index.json"


def index(file_name: str):
    content = f'{{"weight_map": {{"fc.weight": "{file_name}"}}}}'
    return file(INDEX, content.encode())


def moved(name: str) -> Break:
    """Moves config.json to a subfolder."""

    def apply(folder: Path) -> None:
        (folder / name).mkdir()
        (folder / CONFIG).rename(folder / name / CONFIG)

    return apply


def disjoint_vocabulary(folder: Path) -> None:
    """A vocabulary that shares only EOS with other models."""
    words = {f"alien {token}": token for token in range(1, NUM_TOKENS)}
    save_words({"<|eos|>": 0} | words, "<|eos|>", folder)


def quantized(name: str = "int8 W8A8"):
    return lambda folder: quantize(folder, name) and None


MODEL = '"model" of speculative_config: …'
UP = "layers.1.mlp.up_proj"
OTHER_WORDS = {"use_heterogeneous_vocab": True}
of_draft = partial(Row, drafter="draft")
of_eagle3 = partial(Row, drafter="eagle3")
of_peagle = partial(Row, drafter="peagle")

FILES = [
    Row("does not exist: name", removed()),
    Row(f"{MODEL} is a file", model=Path(WEIGHTS)),
    *(Row(f"{MODEL} cannot be opened", model=name) for name in ("x" * 5000, "a\0b")),
    Row(f"{MODEL} has no config.json", moved("full")),
    Row(f"{MODEL} has no config.json", removed(CONFIG)),
    Row(
        f"{MODEL} is a LoRA adapter",
        removed(CONFIG),
        file("adapter_config.json", b"{}"),
    ),
    Row("config.json is not valid …: download", truncated(CONFIG, 200)),
    Row("config.json is not valid …: download", file(CONFIG, b"\xff\xfe\x00")),
    Row("config.json must hold …: download", file(CONFIG, b"[1]")),
    of_eagle3(
        "layer_config in …/config.json must", config(transformer_layer_config=GONE)
    ),
    of_peagle("in …/config.json is missing, which P", config(mask_token_id=GONE)),
    # Vocabularies.
    of_draft("the target's own family", config(vocab_size=4096), rotated(300, 302)),
    of_draft("the target's own family", rotated(300, NUM_TOKENS)),
    of_draft("in common with the target", disjoint_vocabulary, **OTHER_WORDS),
    of_draft("needs the tokenizers", removed("tokenizer.json"), **OTHER_WORDS),
    of_draft("The unk_token or", config(vocab_size=1), **OTHER_WORDS),
    of_draft(
        "tokenizer.json is not valid JSON (…): download",
        config(vocab_size=4096),
        truncated("tokenizer.json", 200),
    ),
    of_draft(
        "tokenizer.json holds no tokenizer: download",
        config(vocab_size=4096),
        file("tokenizer.json", b"{}"),
    ),
    # Weights.
    Row(f"{MODEL} holds no weights: download", removed(WEIGHTS)),
    Row("is not a safetensors file, …: download", truncated(WEIGHTS, 0)),
    Row("is not a safetensors file, …: download", file(WEIGHTS, HTML)),
    Row("header promises …: download", truncated(WEIGHTS, -1000)),
    Row(
        "corrupt safetensors header: download",
        file(WEIGHTS, (16).to_bytes(8, "little") + b"{" * 16),
    ),
    of_eagle3("json names: download", index("model-2-of-2.safetensors")),
    of_eagle3(
        "files of its own folder, …: download", index("../target/model.safetensors")
    ),
    Row("not a safetensors index: download", file(INDEX, b"{")),
    # PARD-2's projection.
    Row("holds more than tensors, …: download", file(WARP, HTML)),
    Row("holds more than tensors, …: download", SAVED, truncated(WARP, -1000)),
    Row("must hold target_proj.weight", saved(WARP, [1, 2])),
    Row(
        "must hold target_proj.weight",
        saved(WARP, PROJECTION | {"fc.weight": torch.zeros(2)}),
    ),
    Row("in …/config.json contradicts", SAVED, config(pard2_proj_bias=True)),
    *(
        Row(
            "in …/config.json must be a finite",
            SAVED,
            config(pard2_scale=value),
        )
        for value in (float("inf"), "large", True)
    ),
    Row("in …/config.json must be a finite", SAVED, config(pard2_target_dim=[256])),
    Row(
        "in …/config.json must be a list of int", SAVED, config(pard2_target_layers=-1)
    ),
    # Heads.
    of_peagle("has no tensor mask_hidden: para", tensors({"mask_hidden": GONE})),
    of_peagle("mask_hidden of … has shape", tensors({"mask_hidden": (1, 1, 256)})),
    of_eagle3("has no tensor fc.weight: it is not an", tensors({"fc.weight": GONE})),
    of_eagle3("fc.weight of … has shape", tensors({"fc.weight": (256, 512)})),
    of_eagle3("has no tensor d2t: it", tensors({"d2t": GONE})),
    of_eagle3(
        "d2t of … has shape", tensors({"d2t": torch.zeros(100, dtype=torch.int64)})
    ),
    of_eagle3(
        "d2t of … has shape", tensors({"d2t": torch.zeros(1536, 1, dtype=torch.int64)})
    ),
    of_eagle3("d2t of … names tokens", tensors({"d2t": torch.full((1536,), 5000)})),
    of_eagle3(
        "d2t of … names all tokens",
        config(draft_vocab_size=NUM_TOKENS),
        tensors({"d2t": torch.tensor([1, -1] + [0] * (NUM_TOKENS - 2))}),
    ),
    of_eagle3(
        "lm_head.weight of … has shape", tensors({"lm_head.weight": (NUM_TOKENS, 256)})
    ),
    of_eagle3("has no tensor lm_head.weight: it", tensors({"lm_head.weight": GONE})),
    of_eagle3(
        "has no tensor embed_tokens.weight: it",
        config(target_hidden_size=256),
        config(transformer_layer_config__hidden_size=512),
        tensors({"fc.weight": (512, 768)}),
    ),
    # Layers and embeddings.
    Row(
        "embed_tokens.weight of … has shape",
        tensors({"model.embed_tokens.weight": (2048, 192)}),
    ),
    of_peagle(
        "embed_tokens.weight of … has shape",
        tensors({"embed_tokens.weight": (2560, 128)}),
    ),
    of_peagle(
        "num_hidden_layers",
        edited_weights(
            lambda all: {n: w for n, w in all.items() if "layers.3." not in n}
        ),
    ),
    # Quantized weights.
    of_peagle(
        "has quantized weights, but its config.json",
        quantized(),
        config(quantization_config=GONE),
    ),
    of_peagle(
        "has quantized weights, but no scale",
        quantized(),
        tensors({f"{UP}.weight_scale": GONE}),
    ),
    of_peagle("but no quantized weights", quantized(), tensors({f"{UP}.weight": GONE})),
    of_peagle("but no quantized weights", quantized(), tensors({f"{UP}.weight": (1,)})),
    Row(
        "has quantized weights, but no scale",
        quantized("GPTQ"),
        tensors({f"model.{UP}.scales": GONE}),
    ),
]
