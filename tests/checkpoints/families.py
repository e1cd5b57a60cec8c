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
from functools import partial
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


def _config(
    architecture: str = "LlamaForCausalLM", model_type: str = "llama", **changes: Any
) -> dict[str, Any]:
    """A config.json; what is `...` is left out."""
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


_QWEN2 = ("Qwen2ForCausalLM", "qwen2")
_QWEN3 = ("Qwen3ForCausalLM", "qwen3")
_target = partial(
    _config, num_hidden_layers=NUM_TARGET_LAYERS, intermediate_size=256, **_ROPE
)
_WINDOWED = ["sliding_attention", "full_attention"]
TARGETS = {
    "llama": _target(),
    "qwen2": _target(
        *_QWEN2, num_attention_heads=2, head_dim=..., vocab_size=PADDED_VOCAB
    ),
    "qwen3": _target(*_QWEN3),
    # Kernels of experts take multiples of 32.
    "gpt-oss": _target(
        "GptOssForCausalLM",
        "gpt_oss",
        hidden_size=160,
        intermediate_size=160,
        num_experts_per_tok=2,
        num_local_experts=4,
        layer_types=_WINDOWED * (NUM_TARGET_LAYERS // 2),
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
    "layer_types": _WINDOWED * (NUM_TARGET_LAYERS // 4),
}


def _width(target: str) -> int:
    return TARGETS[target]["hidden_size"]


@dataclass(frozen=True)
class Published:
    """One drafter as published, and what is to be made of it.

    Attributes:
        family: its row in `vllm.config.drafter.families.FAMILIES`.
        config: its config.json, but for the target's folder.
        tensors: name to values, float32 where they are not integers.
        num_drafts, layers: what must be detected; layers None means the target's
            defaults.
        target: a key of TARGETS.
        dtype: of the tensors in the file.
        files: "safetensors", "bin", or "sharded" safetensors with an index.
        warp: what is in warp_model.bin, if there is one.
        settings: of the speculative config, beside the folder.
    """

    family: str
    config: Config
    tensors: Callable[[Config], Tensors]
    num_drafts: int
    layers: tuple[int, ...] | None = None
    target: str = "llama"
    dtype: torch.dtype = torch.bfloat16
    files: str = "safetensors"
    warp: Callable[[Config], Tensors] | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def method(self) -> str:
        return "draft_model" if self.family.startswith("PARD") else "eagle3"

    @property
    def width(self) -> int:
        """Tokens per pass."""
        return 1 if self.family.startswith("EAGLE") else self.num_drafts

    @property
    def mask(self) -> int | None:
        return MASK if self.width > 1 else None


_PROBABILISTIC = {"draft_sample_method": "probabilistic"}

# PARD: a language model with two more keys.

_pard_config = partial(
    _config,
    num_hidden_layers=2,
    num_attention_heads=2,
    tie_word_embeddings=True,
    pard_token=MASK,
    spd_type="pard",
)
_LIKE_QWEN3 = {"rms_norm_eps": 1e-6, "rope_theta": 1e6}
# As newer transformers write the keys.
_NEW_ROPE = {"rope_parameters": _ROPE | _LLAMA3}
_NEW_DTYPE = {"torch_dtype": ..., "dtype": "bfloat16"}
_pard = partial(Published, "PARD", tensors=language_model, num_drafts=8)
_PARDS = {
    # Tied, and yet with an lm_head of its own in the file, as some are published.
    "pard-qwen3": _pard(
        _pard_config(*_QWEN3, **_LIKE_QWEN3),
        tensors=partial(language_model, copies_lm_head=True),
        target="qwen3",
    ),
    # As Qwen2.5-0.5B for Qwen2.5-7B: 128 rows of padding fewer than the target.
    "pard-qwen2.5": _pard(
        _pard_config(*_QWEN2, head_dim=..., rope_theta=1e6),
        target="qwen2",
        settings=_PROBABILISTIC,
    ),
    # Tensors in several files, and 128 rows of padding more than the target.
    "pard-llama": _pard(
        _pard_config(vocab_size=PADDED_VOCAB, **_NEW_DTYPE, **_NEW_ROPE),
        target="gpt-oss",
        files="sharded",
        settings=_PROBABILISTIC,
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


_pard2_config = partial(_pard_config, pard2=True, spd_type="pard2")
_KEYS = {
    "pard2_proj_bias": False,
    "pard2_scale": _SCALE,
    "pard2_target_dim": len(_LAYERS) * HIDDEN,
    "pard2_target_layers": _LAYERS,
}
# By the names they had at first, and the last layer alone.
_OLD_KEYS = {
    "proj_bias": True,
    "feat_scale": _SCALE,
    "pard_target_dim": _width("gpt-oss"),
}
_pard2 = partial(Published, "PARD-2", tensors=language_model, num_drafts=15)
_PARD2S = {
    "pard2-qwen3": _pard2(
        _pard2_config(*_QWEN3, **_LIKE_QWEN3, **_KEYS),
        warp=_projection(len(_LAYERS), "qwen3"),
        layers=(8, 6, 4, 2),  # of nine states: the last one's after the norm
        target="qwen3",
    ),
    "pard2-llama-bias": _pard2(
        _pard2_config(**_NEW_ROPE, **_OLD_KEYS),
        warp=_projection(1, "gpt-oss", bias=True),
        layers=(8,),
        target="gpt-oss",
    ),
    # As it was once published: without the projection it is a PARD.
    "pard2-no-warp": _pard2(_pard2_config(**_KEYS)),
}


# Heads.

_HEAD = "LlamaForCausalLMEagle3"
_TAPS = "eagle_aux_hidden_state_layer_ids"
_MASKED = {"num_hidden_layers": 2, "mask_token_id": MASK}
_head_config = partial(_config, draft_vocab_size=DRAFT_VOCAB)


def _head(
    num_taps: int = 3,
    d2t: torch.dtype | None = torch.int64,
    mask_dims: int = 0,
    **layout: Any,
) -> Callable[[Config], Tensors]:
    """What makes a head's tensors.

    Args:
        num_taps: layers of the target that it is fed.
        d2t: dtype of its table of ids; None: it has none.
        mask_dims: of `mask_hidden`; 0: it has none.
        layout: of its names, as `tensors.head` takes it.
    """

    def make(config: Config) -> Tensors:
        shape = config | config.get("transformer_layer_config", {})
        hidden = shape["hidden_size"]
        fed = num_taps * hidden
        made = head(shape, num_taps, **layout)
        if mask_dims:
            lead = [1] * (mask_dims - 1)
            made["mask_hidden"] = random("mask_hidden", 1, fed).view(*lead, fed)
        if config.get("norm_before_fc"):
            made["input_norm.weight"] = random("input_norm", fed)
        for i in range(num_taps if config.get("fc_norm") else 0):
            made[f"fc_norm.{i}.weight"] = random(f"fc_norm.{i}", hidden)
        if d2t is not None:
            made |= draft_vocabulary(VOCAB, config["draft_vocab_size"], d2t)
        return made

    return make


def _nemo(config: Config) -> Tensors:
    tops = ("lm_head.weight", "mask_hidden", "d2t", "t2d")
    made = _head(mask_dims=3)(config)
    return {n if n in tops else f"model.{n}": w for n, w in made.items()}


_amazon = partial(Published, "P-EAGLE, Amazon", num_drafts=7)
_specforge = partial(Published, "P-EAGLE, SpecForge or verl-SpeCo")
_PEAGLES = {
    # `midlayer`, then `layers.1` on.
    "peagle-amazon": _amazon(
        _head_config(
            _HEAD,
            hidden_size=_width("gpt-oss"),
            num_hidden_layers=4,
            draft_vocab_size=VOCAB,
            ptd_token_id=MASK,
            rope_scaling=_LLAMA3,
            attention_bias=False,
        ),
        _head(mask_dims=3, first="midlayer"),
        target="gpt-oss",
    ),
    # Its target has 128 rows of padding more.
    "peagle-amazon-reduced": _amazon(
        _head_config(num_hidden_layers=2, ptd_token_id=MASK),
        _head(d2t=torch.int32, mask_dims=2, first="midlayer"),
        target="qwen2",
        settings=_PROBABILISTIC,
    ),
    "peagle-nemo": Published(
        "P-EAGLE, NeMo",
        _head_config(
            "LlamaEagle3DraftModel", **_MASKED, parallel_drafting=True, num_depths=6
        ),
        _nemo,
        num_drafts=6,
    ),
    # verl-SpeCo has a name of its own for the model too.
    "peagle-verl-speco": _specforge(
        _head_config(
            "LlamaForCausalLMPeagle",
            "llama_peagle",
            **_MASKED,
            num_draft_layers=2,
            num_aux_hidden_states=3,
            target_hidden_size=HIDDEN,
            num_depths=5,
        ),
        _head(mask_dims=3),
        num_drafts=5,
    ),
    # The mask token alone could be a masked language model's; mask_hidden decides.
    "peagle-specforge": _specforge(
        _head_config("PEagleDraftModel", **_MASKED, eagle_config={_TAPS: [1, 3, 6]}),
        _head(mask_dims=3, first="midlayer", embed=False),
        num_drafts=7,
        layers=(1, 3, 6),
    ),
}


# Heads of speculators: the transformer's config is nested.

_NOT_NESTED = ("architectures", "torch_dtype", "transformers_version")


def _speculator(
    architecture: str,
    shape: Config,
    tensors: Callable[[Config], Tensors],
    num_drafts: int,
    layers: list[int] | None = None,
    *,
    target: str = "llama",
    dtype: torch.dtype = torch.bfloat16,
    **more: Any,
) -> Published:
    is_parallel = architecture.startswith("PEagle")
    kind = "peagle" if is_parallel else "eagle3"
    proposal = {
        "accept_tolerance": 0.0,
        "proposal_type": "greedy",
        "speculative_tokens": num_drafts,
        "verifier_accept_k": 1,
    }
    config = {
        "architectures": [architecture],
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
            key: value for key, value in shape.items() if key not in _NOT_NESTED
        },
        "transformers_version": "4.55.4",
    }
    if layers is not None:
        config[_TAPS] = layers
    if is_parallel:
        config |= {"mask_token_id": MASK, "embed_requires_grad": True}
    return Published(
        f"{'P-EAGLE' if is_parallel else 'EAGLE-3'}, speculators",
        config | more,
        tensors,
        num_drafts,
        layers and tuple(layers),
        target=target,
        dtype=dtype,
    )


_QWEN3_LAYERS = _config(*_QWEN3, num_hidden_layers=2, rope_theta=1e6)
_SPECULATORS = {
    # As the ones converted from SafeAILab's: no layer ids, and null for a size.
    "speculators-eagle3": _speculator(
        "Eagle3Speculator",
        _config(),
        _head(),
        5,
        dtype=torch.float32,
        auto_map={"": "eagle3.Eagle3SpeculatorConfig"},
        norm_before_residual=False,
        target_hidden_size=None,
        **{_TAPS: None},
    ),
    "speculators-eagle3-qwen3": _speculator(
        "Eagle3DraftModel",
        _QWEN3_LAYERS,
        _head(4),
        3,
        [1, 3, 4, 7],
        norm_before_residual=True,
    ),
    # RedHatAI's for gpt-oss: a norm before the projection, and a narrow MLP.
    "speculators-eagle3-input-norm": _speculator(
        "Eagle3Speculator",
        _config(hidden_size=160, intermediate_size=160),
        _head(),
        3,
        target="gpt-oss",
        norm_before_fc=True,
        norm_before_residual=True,
    ),
    "speculators-peagle-qwen3": _speculator(
        "PEagleSpeculator",
        _QWEN3_LAYERS,
        _head(d2t=None, mask_dims=3),
        8,
        [2, 4, 6],
        target="qwen3",
        draft_vocab_size=VOCAB,
        norm_before_residual=False,
    ),
    # Trained as EAGLE-3.1: a norm of each tapped layer, and normed states fed back.
    "speculators-peagle-fc-norm": _speculator(
        "PEagleDraftModel",
        _config(num_hidden_layers=4),
        _head(4, mask_dims=3),
        4,
        [1, 2, 5, 7],
        fc_norm=True,
        norm_output=True,
    ),
}


# EAGLE-3 of SafeAILab (yuhuili), SpecForge and NVIDIA: most have no embeddings.


def _eagle_config(layers: list[int] | None) -> dict[str, Any]:
    return {
        _TAPS: layers,
        "next_layer_regular": True,
        "parallel_draft_step": 1,
        "use_aux_hidden_state": True,
        "use_input_layernorm_in_first_layer": True,
        "use_last_layernorm": True,
        "use_mtp_layernorm": False,
    }


_midlayer = _head(first="midlayer", embed=False)
_safeailab = partial(Published, "EAGLE-3, SafeAILab", num_drafts=3, files="bin")
_nvidia = partial(Published, "EAGLE-3, SpecForge or NVIDIA", num_drafts=3)
_EAGLES = {
    "eagle3-yuhuili": _safeailab(
        _head_config(
            num_attention_heads=2,
            head_dim=...,
            max_position_embeddings=48,  # less than the target's: never binding
            pad_token_id=0,
            torch_dtype="float16",
            transformers_version="4.28.1",
        ),
        _midlayer,
        dtype=torch.float16,
    ),
    # SafeAILab's for Vicuna count the target's layers; there is but one.
    "eagle3-vicuna": _safeailab(
        _head_config(num_hidden_layers=40),
        lambda config: _midlayer(config | {"num_hidden_layers": 1}),
    ),
    "eagle3-angelslim": _nvidia(
        _head_config(_HEAD), _midlayer, target="qwen3", files="bin"
    ),
    # As for gpt-oss, at its true width.
    "eagle3-specforge": _nvidia(
        _head_config(
            _HEAD,
            hidden_size=WIDE,
            **_NEW_DTYPE,
            eagle_config={_TAPS: [1, 2, 3], "use_aux_hidden_state": True},
        ),
        _midlayer,
        target="gpt-oss-wide",
        layers=(1, 2, 3),
    ),
    # Layers by number, and ids of others than the target's defaults.
    "eagle3-nvidia": _nvidia(
        _head_config(
            _HEAD,
            draft_vocab_size=VOCAB,
            rope_scaling=None,
            attention_dropout=0.0,
            mlp_bias=False,
            eagle_config=_eagle_config([1, 4, 6]),
        ),
        _head(d2t=None, embed=False),
        layers=(1, 4, 6),
    ),
    # The whole vocabulary, no table of ids, null for the layers. Its target has 128
    # rows of padding more.
    "eagle3-nvidia-old": _nvidia(
        _head_config(_HEAD, draft_vocab_size=VOCAB, eagle_config=_eagle_config(None)),
        _head(d2t=None, first="midlayer", embed=False),
        target="qwen2",
        settings=_PROBABILISTIC,
    ),
    # Between the two: layers by number, but called midlayer.
    "eagle3-nvidia-midlayers": _nvidia(
        _head_config(_HEAD, num_hidden_layers=2, eagle_config=_eagle_config([2, 5, 7])),
        _head(first="midlayer.0", later="midlayer.{}", embed=False),
        layers=(2, 5, 7),
    ),
}
PUBLISHED: dict[str, Published] = _PARDS | _PARD2S | _PEAGLES | _SPECULATORS | _EAGLES


# Writing them.


def write_target(
    name: str, folder: Path, tokenizer: Path, has_weights: bool = True
) -> Path:
    """A target of random weights, with the tokenizer of the folder `tokenizer`."""
    config = TARGETS[name]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    _copy_tokenizer(tokenizer, folder)
    if has_weights:
        tensors = language_model(config)
        tensors["lm_head.weight"][TOKENS:] = 0  # padding is never the likeliest
        save_file(tensors, folder / "model.safetensors")
    return folder


def write_drafter(name: str, folder: Path, target: Path) -> Path:
    """The files of one of PUBLISHED; a language model gets the target's tokenizer."""
    drafter = PUBLISHED[name]
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
