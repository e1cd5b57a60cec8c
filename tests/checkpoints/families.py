# SPDX-License-Identifier: Apache-2.0
"""Drafters as they are published, shrunk: keys, names, dtypes and kinds of files.

Hidden sizes and vocabularies are small; what the families differ in is kept: heads
that do not divide the hidden size, layers' names, masks' shapes, missing embeddings,
vocabularies padded by 128 rows, keys in the style of older and newer transformers.
One target is gpt-oss: no width a power of two, and a window in every second layer.
"""

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from .tensors import (
    Config,
    Tensors,
    draft_vocabulary,
    head,
    language_model,
    random,
    write_tensors,
)

# TOKENS are the bundled tokenizer's, the rest of the rows is padding: so is the mask.
HIDDEN, TOKENS, VOCAB, DRAFT_VOCAB = 128, 2560, 2688, 640
PADDED_VOCAB = VOCAB + 128
MASK = VOCAB - 10
NUM_TARGET_LAYERS = 8

_ROPE = {"rope_theta": 10000.0}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,  # small, so that it tells
}


def _config(model_type: str, architecture: str, **changes: Any) -> dict[str, Any]:
    config = {
        "architectures": [architecture],
        "bos_token_id": 0,
        "eos_token_id": 1,
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "initializer_range": 0.02,
        "intermediate_size": 448,
        "max_position_embeddings": 2048,
        "model_type": model_type,
        "num_attention_heads": 4,
        "num_hidden_layers": 1,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.52.4",
        "use_cache": True,
        "vocab_size": VOCAB,
    } | changes
    return {key: value for key, value in config.items() if value is not ...}


def _target(model_type: str, architecture: str, **changes: Any) -> dict[str, Any]:
    shape = {"num_hidden_layers": NUM_TARGET_LAYERS, "intermediate_size": 256}
    return _config(model_type, architecture, **shape | _ROPE | changes)


TARGETS = {
    "llama": _target("llama", "LlamaForCausalLM"),
    "qwen2": _target(
        "qwen2",
        "Qwen2ForCausalLM",
        num_attention_heads=2,
        head_dim=...,
        vocab_size=PADDED_VOCAB,
    ),
    "qwen3": _target("qwen3", "Qwen3ForCausalLM"),
    # Kernels of experts take multiples of 32.
    "gpt-oss": _target(
        "gpt_oss",
        "GptOssForCausalLM",
        hidden_size=160,
        intermediate_size=160,
        num_experts_per_tok=2,
        num_local_experts=4,
        layer_types=["sliding_attention", "full_attention"] * 4,
        sliding_window=16,
        attention_bias=True,
        rope_theta=150000.0,
        rope_scaling={
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 64,
        },
    ),
}

# gpt-oss' own width, and little else of it.
WIDE = 2880
TARGETS["gpt-oss-wide"] = TARGETS["gpt-oss"] | {
    "hidden_size": WIDE,
    "intermediate_size": 32,
    "num_local_experts": 2,
    "num_hidden_layers": NUM_TARGET_LAYERS // 2,
    "layer_types": ["sliding_attention", "full_attention"] * (NUM_TARGET_LAYERS // 4),
}


def _width(target: str) -> int:
    return TARGETS[target]["hidden_size"]


@dataclass(frozen=True)
class Published:
    """One drafter as published, and what is to be made of it.

    Attributes:
        family: its row in `vllm.config.drafter.families.FAMILIES`.
        config: its config.json; None where it depends on the target's folder.
        tensors: name to values, float32 where they are not integers.
        target: a key of TARGETS.
        num_drafts, width, mask, layers: what must be detected; layers None means the
            target's defaults.
        dtype: of the tensors in the file.
        files: "safetensors", "bin", or "sharded" safetensors with an index.
        warp: what is in warp_model.bin, if there is one.
        settings: of the speculative config, beside the folder.
    """

    family: str
    config: Config
    tensors: Callable[[Config], Tensors]
    num_drafts: int
    width: int = 1
    mask: int | None = None
    layers: tuple[int, ...] | None = None
    target: str = "llama"
    dtype: torch.dtype = torch.bfloat16
    files: str = "safetensors"
    warp: Callable[[Config], Tensors] | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def method(self) -> str:
        return "draft_model" if self.family.startswith("PARD") else "eagle3"


# PARD: a language model with two more keys.


def _pard(model_type: str, architecture: str, **more: Any) -> dict[str, Any]:
    shape = {
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "tie_word_embeddings": True,
        "pard_token": MASK,
        "spd_type": "pard",
    }
    return _config(model_type, architecture, **shape | more)


def _model(config: Config) -> Tensors:
    return language_model(config, lm_head=False)


def _model_with_lm_head(config: Config) -> Tensors:
    return language_model(config, lm_head=True)


_PROBABILISTIC = {"draft_sample_method": "probabilistic"}
_PARD = {
    "family": "PARD",
    "num_drafts": 8,
    "width": 8,
    "mask": MASK,
}
_QWEN3 = _pard("qwen3", "Qwen3ForCausalLM", rms_norm_eps=1e-6, rope_theta=1e6)
_PARDS = {
    "pard-qwen3": Published(config=_QWEN3, tensors=_model, target="qwen3", **_PARD),
    # Published so too: tied, and yet with an lm_head of its own in the file.
    "pard-qwen3-lm-head": Published(
        config=_QWEN3, tensors=_model_with_lm_head, target="qwen3", **_PARD
    ),
    # As Qwen2.5-0.5B for Qwen2.5-7B: 128 rows of padding fewer than the target.
    "pard-qwen2.5": Published(
        config=_pard("qwen2", "Qwen2ForCausalLM", head_dim=..., rope_theta=1e6),
        tensors=_model,
        target="qwen2",
        settings=_PROBABILISTIC,
        **_PARD,
    ),
    # Keys as newer transformers write them, tensors in two files, and 128 rows of
    # padding more than the target.
    "pard-llama": Published(
        config=_pard(
            "llama",
            "LlamaForCausalLM",
            vocab_size=PADDED_VOCAB,
            torch_dtype=...,
            dtype="bfloat16",
            rope_parameters=_ROPE | _LLAMA3,
        ),
        tensors=_model,
        target="gpt-oss",
        files="sharded",
        settings=_PROBABILISTIC,
        **_PARD,
    ),
}


# PARD-2: beside such a model, a projection of the target's states. They weigh about as
# much as the embeddings, and each layer's block of columns has weights of its own.

_SCALE = 0.02
_LAYERS = [-1, -3, -5, -7]


def _projection(
    num_layers: int, target: str, bias: bool = False
) -> Callable[[Config], Tensors]:
    def make(config: Config) -> Tensors:
        rows, columns = config["hidden_size"], _width(target)
        blocks = [
            random(f"target_proj.{i}", rows, columns) / 4 / _SCALE
            for i in range(num_layers)
        ]
        made = {"target_proj.weight": torch.cat(blocks, dim=1)}
        if bias:
            made["target_proj.bias"] = random("target_proj.bias", rows) / _SCALE
        return made

    return make


def _pard2(model_type: str, architecture: str, **more: Any) -> dict[str, Any]:
    keys = {
        "pard2": True,
        "spd_type": "pard2",
        "pard2_proj_bias": False,
        "pard2_scale": _SCALE,
        "pard2_target_dim": len(_LAYERS) * HIDDEN,
        "pard2_target_layers": _LAYERS,
    }
    return _pard(model_type, architecture, **keys | more)


_PARD2 = {"family": "PARD-2", "num_drafts": 15, "width": 15, "mask": MASK}
_PARD2S = {
    "pard2-qwen3": Published(
        config=_pard2("qwen3", "Qwen3ForCausalLM", rms_norm_eps=1e-6, rope_theta=1e6),
        tensors=_model,
        warp=_projection(len(_LAYERS), "qwen3"),
        layers=(8, 6, 4, 2),  # of nine states: the last one's after the norm
        target="qwen3",
        **_PARD2,
    ),
    # Keys by the names they had at first, the last layer alone, and a bias.
    "pard2-llama-bias": Published(
        config=_pard2(
            "llama",
            "LlamaForCausalLM",
            rope_parameters=_ROPE | _LLAMA3,
            pard2_scale=...,
            feat_scale=_SCALE,
            pard2_target_dim=...,
            pard_target_dim=_width("gpt-oss"),
            pard2_target_layers=...,
            pard2_proj_bias=...,
            proj_bias=True,
        ),
        tensors=_model,
        warp=_projection(1, "gpt-oss", bias=True),
        layers=(8,),
        target="gpt-oss",
        **_PARD2,
    ),
    # As it was once published: without the projection it is a PARD.
    "pard2-no-warp": Published(
        config=_pard2("llama", "LlamaForCausalLM"), tensors=_model, **_PARD2
    ),
}


# P-EAGLE as Amazon publishes it: `midlayer`, then `layers.1` on.


def _amazon(config: Config) -> Tensors:
    fed = 3 * config["hidden_size"]
    return head(config, 3, first="midlayer", mask_shape=(1, 1, fed)) | draft_vocabulary(
        VOCAB, VOCAB, torch.int64
    )


def _amazon_reduced(config: Config) -> Tensors:
    fed = 3 * config["hidden_size"]
    return head(config, 3, first="midlayer", mask_shape=(1, fed)) | draft_vocabulary(
        VOCAB, DRAFT_VOCAB, torch.int32
    )


def _nemo(config: Config) -> Tensors:
    made = head(config, 3, mask_shape=(1, 1, 3 * HIDDEN))
    tops = ("lm_head.weight", "mask_hidden")
    named = {n if n in tops else f"model.{n}": w for n, w in made.items()}
    return named | draft_vocabulary(VOCAB, DRAFT_VOCAB, torch.int64)


_PEAGLES = {
    "peagle-amazon": Published(
        family="P-EAGLE, Amazon",
        config=_config(
            "llama",
            "LlamaForCausalLMEagle3",
            hidden_size=_width("gpt-oss"),
            num_hidden_layers=4,
            draft_vocab_size=VOCAB,
            ptd_token_id=MASK,
            rope_scaling=_LLAMA3,
            attention_bias=False,
        ),
        tensors=_amazon,
        target="gpt-oss",
        num_drafts=7,
        width=7,
        mask=MASK,
    ),
    # Its target has 128 rows of padding more.
    "peagle-amazon-reduced": Published(
        family="P-EAGLE, Amazon",
        config=_config(
            "llama",
            "LlamaForCausalLM",
            num_hidden_layers=2,
            draft_vocab_size=DRAFT_VOCAB,
            ptd_token_id=MASK,
        ),
        tensors=_amazon_reduced,
        target="qwen2",
        num_drafts=7,
        width=7,
        mask=MASK,
        settings=_PROBABILISTIC,
    ),
    "peagle-nemo": Published(
        family="P-EAGLE, NeMo",
        config=_config(
            "llama",
            "LlamaEagle3DraftModel",
            num_hidden_layers=2,
            draft_vocab_size=DRAFT_VOCAB,
            parallel_drafting=True,
            mask_token_id=MASK,
            num_depths=6,
        ),
        tensors=_nemo,
        num_drafts=6,
        width=6,
        mask=MASK,
    ),
    # verl-SpeCo has a name of its own for the model too.
    "peagle-verl-speco": Published(
        family="P-EAGLE, SpecForge or verl-SpeCo",
        config=_config(
            "llama_peagle",
            "LlamaForCausalLMPeagle",
            num_hidden_layers=2,
            num_draft_layers=2,
            num_aux_hidden_states=3,
            target_hidden_size=HIDDEN,
            draft_vocab_size=DRAFT_VOCAB,
            mask_token_id=MASK,
            num_depths=5,
        ),
        tensors=lambda config: (
            head(config, 3, mask_shape=(1, 1, 3 * HIDDEN))
            | draft_vocabulary(VOCAB, DRAFT_VOCAB, torch.int64)
        ),
        num_drafts=5,
        width=5,
        mask=MASK,
    ),
    # The mask token alone could be a masked language model's; mask_hidden decides.
    "peagle-specforge": Published(
        family="P-EAGLE, SpecForge or verl-SpeCo",
        config=_config(
            "llama",
            "PEagleDraftModel",
            num_hidden_layers=2,
            draft_vocab_size=DRAFT_VOCAB,
            mask_token_id=MASK,
            eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 3, 6]},
        ),
        tensors=lambda config: (
            head(
                config, 3, first="midlayer", embed=False, mask_shape=(1, 1, 3 * HIDDEN)
            )
            | draft_vocabulary(VOCAB, DRAFT_VOCAB, torch.int64)
        ),
        num_drafts=7,
        width=7,
        mask=MASK,
        layers=(1, 3, 6),
    ),
}


# Heads of speculators: the transformer's config is nested.

_NESTED = ("architectures", "torch_dtype", "transformers_version")


def _speculators(kind: str, shape: Config, num_drafts: int, **more: Any) -> Config:
    names = {"eagle3": "Eagle3Speculator", "peagle": "PEagleSpeculator"}
    proposal = {
        "accept_tolerance": 0.0,
        "proposal_type": "greedy",
        "speculative_tokens": num_drafts,
        "verifier_accept_k": 1,
    }
    return {
        "architectures": [names[kind]],
        "draft_vocab_size": DRAFT_VOCAB,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            # The target's folder is filled in as the files are written.
            "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": ""},
        },
        "speculators_model_type": kind,
        "speculators_version": "0.5.0.dev5",
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "transformer_layer_config": {
            key: value for key, value in shape.items() if key not in _NESTED
        },
        "transformers_version": "4.55.4",
        **more,
    }


def _speculators_head(num_taps: int, *, parallel: bool, reduced: bool = True):
    def make(config: Config) -> Tensors:
        shape = config["transformer_layer_config"] | {
            "draft_vocab_size": config["draft_vocab_size"]
        }
        hidden = shape["hidden_size"]
        mask = (1, 1, num_taps * hidden) if parallel else None
        made = head(shape, num_taps, mask_shape=mask)
        if config.get("norm_before_fc"):
            made["input_norm.weight"] = random("input_norm", num_taps * hidden)
        if config.get("fc_norm"):
            for i in range(num_taps):
                made[f"fc_norm.{i}.weight"] = random(f"fc_norm.{i}", hidden)
        if reduced:
            made |= draft_vocabulary(VOCAB, DRAFT_VOCAB, torch.int64)
        return made

    return make


_EAGLE3, _PEAGLE = "EAGLE-3, speculators", "P-EAGLE, speculators"
_SPECULATORS = {
    # As the ones converted from SafeAILab's: no layer ids, and null for a size.
    "speculators-eagle3": Published(
        family=_EAGLE3,
        config=_speculators(
            "eagle3",
            _config("llama", "LlamaForCausalLM"),
            5,
            auto_map={"": "eagle3.Eagle3SpeculatorConfig"},
            norm_before_residual=False,
            target_hidden_size=None,
            eagle_aux_hidden_state_layer_ids=None,
        ),
        tensors=_speculators_head(3, parallel=False),
        num_drafts=5,
        dtype=torch.float32,
    ),
    "speculators-eagle3-qwen3": Published(
        family=_EAGLE3,
        config=_speculators(
            "eagle3",
            _config("qwen3", "Qwen3ForCausalLM", num_hidden_layers=2, rope_theta=1e6),
            3,
            architectures=["Eagle3DraftModel"],
            norm_before_residual=True,
            eagle_aux_hidden_state_layer_ids=[1, 3, 4, 7],
        ),
        tensors=_speculators_head(4, parallel=False),
        num_drafts=3,
        layers=(1, 3, 4, 7),
    ),
    # RedHatAI's for gpt-oss: a norm before the projection, and a narrow MLP.
    "speculators-eagle3-input-norm": Published(
        family=_EAGLE3,
        config=_speculators(
            "eagle3",
            _config(
                "llama",
                "LlamaForCausalLM",
                hidden_size=_width("gpt-oss"),
                intermediate_size=_width("gpt-oss"),
            ),
            3,
            norm_before_fc=True,
            norm_before_residual=True,
        ),
        tensors=_speculators_head(3, parallel=False),
        target="gpt-oss",
        num_drafts=3,
    ),
    "speculators-peagle-qwen3": Published(
        family=_PEAGLE,
        config=_speculators(
            "peagle",
            _config("qwen3", "Qwen3ForCausalLM", num_hidden_layers=2, rope_theta=1e6),
            8,
            draft_vocab_size=VOCAB,
            embed_requires_grad=True,
            mask_token_id=MASK,
            norm_before_residual=False,
            eagle_aux_hidden_state_layer_ids=[2, 4, 6],
        ),
        tensors=_speculators_head(3, parallel=True, reduced=False),
        target="qwen3",
        num_drafts=8,
        width=8,
        mask=MASK,
        layers=(2, 4, 6),
    ),
    # Trained as EAGLE-3.1: a norm of each tapped layer, and normed states fed back.
    "speculators-peagle-fc-norm": Published(
        family=_PEAGLE,
        config=_speculators(
            "peagle",
            _config("llama", "LlamaForCausalLM", num_hidden_layers=4),
            4,
            architectures=["PEagleDraftModel"],
            embed_requires_grad=True,
            fc_norm=True,
            norm_output=True,
            mask_token_id=MASK,
            eagle_aux_hidden_state_layer_ids=[1, 2, 5, 7],
        ),
        tensors=_speculators_head(4, parallel=True),
        num_drafts=4,
        width=4,
        mask=MASK,
        layers=(1, 2, 5, 7),
    ),
}


# EAGLE-3 of SafeAILab (yuhuili), SpecForge and NVIDIA.


def _midlayer(config: Config) -> Tensors:
    return head(config, 3, first="midlayer", embed=False) | draft_vocabulary(
        VOCAB, DRAFT_VOCAB, torch.int64
    )


def _eagle_config(layers: list[int] | None) -> dict[str, Any]:
    return {
        "eagle_aux_hidden_state_layer_ids": layers,
        "next_layer_regular": True,
        "parallel_draft_step": 1,
        "use_aux_hidden_state": True,
        "use_input_layernorm_in_first_layer": True,
        "use_last_layernorm": True,
        "use_mtp_layernorm": False,
    }


_NESTED_LAYERS = "EAGLE-3, SpecForge or NVIDIA"
_EAGLES = {
    "eagle3-yuhuili": Published(
        family="EAGLE-3, SafeAILab",
        config=_config(
            "llama",
            "LlamaForCausalLM",
            num_attention_heads=2,
            head_dim=...,
            draft_vocab_size=DRAFT_VOCAB,
            max_position_embeddings=48,  # less than the target's: never binding
            pad_token_id=0,
            torch_dtype="float16",
            transformers_version="4.28.1",
        ),
        tensors=_midlayer,
        num_drafts=3,
        dtype=torch.float16,
        files="bin",
    ),
    # SafeAILab's for Vicuna count the target's layers; there is but one.
    "eagle3-vicuna": Published(
        family="EAGLE-3, SafeAILab",
        config=_config(
            "llama",
            "LlamaForCausalLM",
            num_hidden_layers=40,
            draft_vocab_size=DRAFT_VOCAB,
        ),
        tensors=lambda config: _midlayer(config | {"num_hidden_layers": 1}),
        num_drafts=3,
        files="bin",
    ),
    "eagle3-angelslim": Published(
        family=_NESTED_LAYERS,
        config=_config("llama", "LlamaForCausalLMEagle3", draft_vocab_size=DRAFT_VOCAB),
        tensors=_midlayer,
        target="qwen3",
        num_drafts=3,
        files="bin",
    ),
    "eagle3-specforge": Published(
        family=_NESTED_LAYERS,
        config=_config(
            "llama",
            "LlamaForCausalLMEagle3",
            hidden_size=_width("gpt-oss"),
            draft_vocab_size=DRAFT_VOCAB,
            torch_dtype=...,
            dtype="bfloat16",
            eagle_config={
                "eagle_aux_hidden_state_layer_ids": [1, 4, 6],
                "use_aux_hidden_state": True,
            },
        ),
        tensors=_midlayer,
        target="gpt-oss",
        num_drafts=3,
        layers=(1, 4, 6),
    ),
    # RedHatAI's and SpecForge's for gpt-oss, at their true width.
    "eagle3-gpt-oss-width": Published(
        family=_NESTED_LAYERS,
        config=_config(
            "llama",
            "LlamaForCausalLMEagle3",
            hidden_size=WIDE,
            draft_vocab_size=DRAFT_VOCAB,
            eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 2, 3]},
        ),
        tensors=_midlayer,
        target="gpt-oss-wide",
        num_drafts=3,
        layers=(1, 2, 3),
    ),
    # Layers by number, and ids of others than the target's defaults.
    "eagle3-nvidia": Published(
        family=_NESTED_LAYERS,
        config=_config(
            "llama",
            "LlamaForCausalLMEagle3",
            draft_vocab_size=VOCAB,
            rope_scaling=None,
            attention_dropout=0.0,
            mlp_bias=False,
            eagle_config=_eagle_config([1, 4, 6]),
        ),
        tensors=lambda config: head(config, 3, embed=False),
        num_drafts=3,
        layers=(1, 4, 6),
    ),
    # The whole vocabulary, no table of ids, null for the layers. Its target has 128
    # rows of padding more.
    "eagle3-nvidia-old": Published(
        family=_NESTED_LAYERS,
        config=_config(
            "llama",
            "LlamaForCausalLMEagle3",
            draft_vocab_size=VOCAB,
            eagle_config=_eagle_config(None),
        ),
        tensors=lambda config: head(config, 3, first="midlayer", embed=False),
        target="qwen2",
        num_drafts=3,
        settings=_PROBABILISTIC,
    ),
    # Between the two: layers by number, but called midlayer.
    "eagle3-nvidia-midlayers": Published(
        family=_NESTED_LAYERS,
        config=_config(
            "llama",
            "LlamaForCausalLMEagle3",
            num_hidden_layers=2,
            draft_vocab_size=DRAFT_VOCAB,
            eagle_config=_eagle_config([2, 5, 7]),
        ),
        tensors=lambda config: (
            head(config, 3, first="midlayer.0", later="midlayer.{}", embed=False)
            | draft_vocabulary(VOCAB, DRAFT_VOCAB, torch.int64)
        ),
        num_drafts=3,
        layers=(2, 5, 7),
    ),
}
PUBLISHED: dict[str, Published] = _PARDS | _PARD2S | _PEAGLES | _SPECULATORS | _EAGLES


# Writing them.


def write_target(name: str, folder: Path, tokenizer: Path) -> Path:
    """A target of random weights, with the tokenizer of the folder `tokenizer`."""
    config = TARGETS[name]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    tensors = language_model(config, lm_head=True)
    tensors["lm_head.weight"][TOKENS:] = 0  # padding is never the likeliest
    save_file(tensors, folder / "model.safetensors")
    _copy_tokenizer(tokenizer, folder)
    return folder


def write_drafter(name: str, folder: Path, target: Path) -> Path:
    """A drafter of PUBLISHED."""
    return write(PUBLISHED[name], folder, target)


def write(drafter: Published, folder: Path, target: Path) -> Path:
    """A drafter's files; a language model gets the target's tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    config = json.loads(json.dumps(drafter.config))
    if "speculators_config" in config:
        config["speculators_config"]["verifier"]["name_or_path"] = str(target)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    tensors = _stored(drafter.tensors(config), drafter.dtype)
    write_tensors(tensors, folder, drafter.files)
    if drafter.warp is not None:
        warp = _stored(drafter.warp(config), drafter.dtype)
        torch.save(warp, folder / "warp_model.bin")
    if drafter.method == "draft_model":
        _copy_tokenizer(target, folder)
    return folder


def _stored(tensors: Tensors, dtype: torch.dtype) -> Tensors:
    return {n: w.to(dtype) if w.is_floating_point() else w for n, w in tensors.items()}


def _copy_tokenizer(source: Path, folder: Path) -> None:
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / file, folder / file)
