# SPDX-License-Identifier: Apache-2.0
"""Drafters whose folder, config or weights are broken, or another target's."""

import json
from pathlib import Path

import torch

from .bad_row import (
    GONE,
    WEIGHTS,
    Bad,
    config,
    cut,
    file,
    gone,
    saved,
    tensors,
    without_layer,
)

WARP = "warp_model.bin"
PROJECTION = {"target_proj.weight": torch.zeros(192, 256)}
INDEX = json.dumps({"weight_map": {"fc.weight": "model-2-of-2.safetensors"}}).encode()


def exchange_tokens(folder: Path) -> None:
    """Two tokens of the tokenizer change places."""
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    tokens = tokenizer["model"]["vocab"]
    one, other = list(tokens)[300:302]
    tokens[one], tokens[other] = tokens[other], tokens[one]
    path.write_text(json.dumps(tokenizer))


def shift_tokens(folder: Path) -> None:
    """Each token takes the next one's place."""
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    tokens = tokenizer["model"]["vocab"]
    size, first = len(tokens), len(tokenizer["added_tokens"])
    for token, number in tokens.items():
        if number >= first:
            tokens[token] = first + (number + 1 - first) % (size - first)
    path.write_text(json.dumps(tokenizer))


CONFIGS = [
    Bad("no such folder", "does not exist", breaks=(gone(),)),
    Bad("no such folder, EAGLE-3", "does not exist", "eagle3", breaks=(gone(),)),
    Bad("model is a file", "is a file", spec={"model": Path(WEIGHTS)}),
    Bad("no config.json", "has no config.json", breaks=(gone("config.json"),)),
    Bad(
        "LoRA adapter as drafter",
        "LoRA adapter",
        breaks=(gone("config.json"), file("adapter_config.json", b"{}")),
    ),
    Bad(
        "config.json cut short",
        "config.json is not valid JSON",
        breaks=(cut("config.json", 200),),
    ),
    Bad(
        "config.json is empty",
        "config.json is not valid JSON",
        breaks=(file("config.json", b" "),),
    ),
    Bad(
        "config.json is a list",
        "config.json must hold",
        breaks=(file("config.json", b"[1]"),),
    ),
    Bad(
        "config.json is binary",
        "config.json is not valid JSON",
        breaks=(file("config.json", b"\xff\xfe\x00"),),
    ),
    Bad(
        "unknown architecture",
        "Model architectures",
        breaks=(config(architectures=["NoSuchForCausalLM"]),),
    ),
    Bad("unknown model_type", "model type", breaks=(config(model_type="lama"),)),
    Bad(
        "unknown model_type of a head",
        "Unsupported model_type",
        "eagle3",
        breaks=(config(transformer_layer_config__model_type="lama"),),
    ),
    Bad(
        "hidden_size is a word",
        "Validation error for field",
        breaks=(config(hidden_size="wide"),),
    ),
    Bad(
        "mask token past the vocabulary",
        "needs a mask token",
        breaks=(config(pard_token=2560),),
    ),
    Bad("mask token negative", "needs a mask token", breaks=(config(pard_token=-1),)),
    Bad(
        "mask token is a word",
        "needs a mask token",
        breaks=(config(pard_token="<mask>"),),
    ),
    Bad(
        "mask token is a list",
        "needs a mask token",
        breaks=(config(pard_token=[2, 2]),),
    ),
    Bad(
        "mask token of P-EAGLE past the vocabulary",
        "needs a mask token",
        "peagle",
        breaks=(config(mask_token_id=99999),),
    ),
    Bad(
        "mask token of P-EAGLE missing",
        "which P-EAGLE needs",
        "peagle",
        breaks=(config(mask_token_id=GONE),),
    ),
    Bad(
        "mask token of an EAGLE head",
        "with a learned mask_hidden",
        "draft",
        spec={"method": "eagle", "parallel_drafting": True},
        breaks=(config(mask_token_id=2),),
    ),
    Bad(
        "vocabulary smaller than the target's",
        "the target's own family",
        "draft",
        breaks=(config(vocab_size=2048),),
    ),
    Bad(
        "vocabulary of another size, streamed",
        "cannot pad or cut it",
        "peagle",
        breaks=(config(transformer_layer_config__vocab_size=2624),),
        engine={"load_format": "runai_streamer"},
    ),
    Bad(
        "other tokens, and more of them, than the target's",
        "the target's own family",
        "draft",
        breaks=(config(vocab_size=4096), exchange_tokens),
    ),
    Bad(
        "other tokens, and as many",
        "the target's own family",
        "draft",
        breaks=(shift_tokens,),
    ),
    Bad(
        "tokenizer cut short, and vocabularies of other sizes",
        "tokenizer.json is not valid JSON",
        "draft",
        breaks=(config(vocab_size=4096), cut("tokenizer.json", 200)),
    ),
    Bad(
        "tokenizer without tokens, and vocabularies of other sizes",
        "tokenizer.json holds no tokenizer",
        "draft",
        breaks=(config(vocab_size=4096), file("tokenizer.json", b"{}")),
    ),
    Bad(
        "vocabulary larger than the target's",
        "embed_tokens.weight of",
        "draft",
        breaks=(config(vocab_size=4096),),
    ),
    Bad(
        "vocabulary of a head unlike the target's",
        "must be the target's (…), or",
        "eagle3",
        breaks=(config(transformer_layer_config__vocab_size=1280),),
    ),
    Bad(
        "draft vocabulary above the vocabulary",
        "to its vocab_size",
        "eagle3",
        breaks=(config(draft_vocab_size=9999),),
    ),
    Bad(
        "head for a target of another width",
        "target_hidden_size of",
        "eagle3",
        breaks=(config(target_hidden_size=512),),
    ),
    Bad(
        "tapped layer past the target's last",
        "eagle_aux_hidden_state_layer_ids",
        "eagle3",
        breaks=(config(eagle_aux_hidden_state_layer_ids=[1, 3, 99]),),
    ),
    Bad(
        "tapped layer negative",
        "eagle_aux_hidden_state_layer_ids",
        "eagle3",
        breaks=(config(eagle_aux_hidden_state_layer_ids=[-1, 3, 5]),),
    ),
    Bad(
        "tapped layers twice the same",
        "eagle_aux_hidden_state_layer_ids",
        "eagle3",
        breaks=(config(eagle_aux_hidden_state_layer_ids=[1, 1, 5]),),
    ),
    Bad(
        "unknown speculators type",
        "speculators_model_type in",
        "eagle3",
        breaks=(config(speculators_model_type="hydra"),),
    ),
    Bad(
        "no transformer_layer_config",
        "transformer_layer_config in",
        "eagle3",
        breaks=(config(transformer_layer_config=GONE),),
    ),
    Bad(
        "trained depth is a word",
        "num_depths or speculative_tokens in",
        "peagle",
        spec={"num_speculative_tokens": GONE},
        breaks=(
            config(
                speculators_config__proposal_methods=[{"speculative_tokens": "many"}]
            ),
        ),
    ),
    Bad(
        "trained depth is 0",
        "num_depths or speculative_tokens in",
        spec={"num_speculative_tokens": GONE},
        breaks=(config(num_depths=0),),
    ),
    Bad(
        "context shorter than K",
        "the drafter's context",
        "draft",
        breaks=(config(max_position_embeddings=4),),
    ),
    Bad(
        "heads that do not divide",
        "num_attention_heads of",
        "draft",
        breaks=(config(num_key_value_heads=3),),
    ),
]

FILES = [
    Bad("no weights", "holds no weights", breaks=(gone(WEIGHTS),)),
    Bad("weights are empty", "is no safetensors file", breaks=(cut(WEIGHTS, 0),)),
    Bad(
        "weights cut in the header",
        "is no safetensors file",
        breaks=(cut(WEIGHTS, 100),),
    ),
    Bad("weights cut short", "header promises", breaks=(cut(WEIGHTS, -1000),)),
    Bad(
        "weights of P-EAGLE cut short",
        "header promises",
        "peagle",
        breaks=(cut(WEIGHTS, -1000),),
    ),
    Bad(
        "weights are a web page",
        "is no safetensors file",
        breaks=(file(WEIGHTS, b"<!DOCTYPE html><html>Not found</html>"),),
    ),
    Bad(
        "weights are a Git LFS pointer",
        "is no safetensors file",
        breaks=(file(WEIGHTS, b"version https://git-lfs.github.com/spec/v1\n"),),
    ),
    Bad(
        "header is not JSON",
        "corrupt safetensors header",
        breaks=(file(WEIGHTS, (16).to_bytes(8, "little") + b"{" * 16),),
    ),
    Bad(
        "a shard is missing",
        "json names",
        "eagle3",
        breaks=(file("model.safetensors.index.json", INDEX),),
    ),
    Bad(
        "the index is damaged",
        "no safetensors index",
        breaks=(file("model.safetensors.index.json", b"{"),),
    ),
    Bad(
        "the index leads out of the folder",
        "files of its own folder",
        "eagle3",
        breaks=(
            file(
                "model.safetensors.index.json",
                b'{"weight_map": {"fc.weight": "../target/model.safetensors"}}',
            ),
        ),
    ),
    Bad(
        "projection of PARD-2 is a web page",
        "holds more than tensors",
        breaks=(file(WARP, b"<!DOCTYPE html><html>Not found</html>"),),
    ),
    Bad(
        "projection of PARD-2 cut short",
        "holds more than tensors",
        breaks=(saved(WARP, PROJECTION), cut(WARP, -1000)),
    ),
    Bad(
        "projection of PARD-2 pickles code",
        "holds more than tensors",
        breaks=(saved(WARP, PROJECTION | {"run": Path}),),
    ),
    Bad(
        "projection of PARD-2 is a list",
        "must hold target_proj.weight",
        breaks=(saved(WARP, [1, 2]),),
    ),
    Bad(
        "projection of PARD-2 has another tensor",
        "must hold target_proj.weight",
        breaks=(saved(WARP, PROJECTION | {"fc.weight": torch.zeros(2)}),),
    ),
    Bad(
        "projection of PARD-2 lacks its bias",
        "contradicts",
        breaks=(saved(WARP, PROJECTION), config(pard2_proj_bias=True)),
    ),
    Bad(
        "mask_hidden missing",
        "has no tensor mask_hidden",
        "peagle",
        breaks=(tensors({"mask_hidden": GONE}),),
    ),
    Bad(
        "mask_hidden too narrow",
        "mask_hidden of",
        "peagle",
        breaks=(tensors({"mask_hidden": (1, 1, 256)}),),
    ),
    Bad(
        "fc missing",
        "fc.weight: it is no EAGLE-3 head",
        "eagle3",
        breaks=(tensors({"fc.weight": GONE}),),
    ),
    Bad(
        "fc too narrow",
        "fc.weight of",
        "eagle3",
        breaks=(tensors({"fc.weight": (256, 512)}),),
    ),
    Bad(
        "fc of another head",
        "fc.weight of",
        "peagle",
        breaks=(tensors({"fc.weight": (128, 768)}),),
    ),
    Bad("d2t missing", "has no tensor d2t", "eagle3", breaks=(tensors({"d2t": GONE}),)),
    Bad(
        "d2t too short",
        "d2t of … must hold",
        "eagle3",
        breaks=(tensors({"d2t": torch.zeros(100, dtype=torch.int64)}),),
    ),
    Bad(
        "d2t past the vocabulary",
        "d2t of … names tokens",
        "eagle3",
        breaks=(tensors({"d2t": torch.full((1536,), 5000)}),),
    ),
    Bad(
        "d2t in another order",
        "it must hold offsets",
        "eagle3",
        breaks=(
            config(draft_vocab_size=2560),
            tensors(
                {
                    "lm_head.weight": (2560, 256),
                    "d2t": torch.tensor([1, -1] + [0] * 2558),
                }
            ),
        ),
    ),
    Bad(
        "lm_head of another vocabulary",
        "lm_head.weight of",
        "eagle3",
        breaks=(tensors({"lm_head.weight": (2560, 256)}),),
    ),
    Bad(
        "lm_head missing",
        "has no tensor lm_head",
        "eagle3",
        breaks=(tensors({"lm_head.weight": GONE}),),
    ),
    Bad(
        "embeddings of another vocabulary",
        "embed_tokens.weight of",
        "pard",
        breaks=(tensors({"model.embed_tokens.weight": (2048, 192)}),),
    ),
    Bad(
        "embeddings of another width",
        "embed_tokens.weight of",
        "peagle",
        breaks=(tensors({"embed_tokens.weight": (2560, 128)}),),
    ),
    Bad(
        "head wider than the target, no embeddings",
        "has no embed_tokens",
        "eagle3",
        breaks=(
            config(transformer_layer_config__hidden_size=512, target_hidden_size=256),
            tensors({"fc.weight": (512, 768)}),
        ),
    ),
    Bad("a layer is missing", "num_hidden_layers", breaks=(without_layer(3),)),
    Bad(
        "a layer of P-EAGLE is missing",
        "num_hidden_layers",
        "peagle",
        breaks=(without_layer(3),),
    ),
    Bad("a layer too many", "num_hidden_layers", breaks=(config(num_hidden_layers=3),)),
    Bad(
        "a layer of P-EAGLE too many",
        "num_hidden_layers",
        "peagle",
        breaks=(config(transformer_layer_config__num_hidden_layers=3),),
    ),
    Bad(
        "attention of other heads",
        "of head_dim",
        breaks=(config(num_attention_heads=6),),
    ),
    Bad(
        "a tensor is missing",
        "in layer",
        "peagle",
        breaks=(tensors({"layers.1.mlp.up_proj.weight": GONE}),),
    ),
]
