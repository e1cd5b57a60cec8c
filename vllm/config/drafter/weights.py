# SPDX-License-Identifier: Apache-2.0
"""Refuses drafters whose weight files are broken or do not fit their config.

Only safetensors headers and the small table d2t are read; no weights are loaded. Local
folders and files in the hub's cache are checked; files that have yet to be downloaded,
and other formats, are left to the loader.
"""

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from safetensors import safe_open

from vllm.config.cache import KV_CACHE_DTYPES, is_known_kv_cache_dtype
from vllm.logger import init_logger
from vllm.platforms import current_platform

from . import DrafterConfig
from .files import AGAIN, INDEX, MODEL, Tensor, read_headers, takes_aux_hidden_states

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig
    from vllm.config.speculative import SpeculativeConfig

logger = init_logger(__name__)

FROM_FILES = ("auto", "hf", "safetensors")  # load formats that read safetensors
STREAMED = "runai_streamer"  # its loader cannot pad or cut rows
# Architectures that have the tensor names and shapes below.
DENSE = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
HEADS = (
    "Eagle3LlamaForCausalLM",
    "LlamaForCausalLMEagle3",
    "PeagleLlamaForCausalLM",
    "Eagle3Qwen3ForCausalLM",
    "PeagleQwen3ForCausalLM",
)
LAYER = re.compile(r"(?:(?:layers|midlayer)\.(\d+)|midlayer)\.(?=[a-z])")
# Names that safetensors has for the dtypes of weights that are not quantized.
PLAIN = ("F64", "F32", "F16", "BF16")
# Starts of the names of methods whose checkpoints hold weights and their scales.
WITH_SCALES = ("compressed-tensors", "modelopt", "gptq", "awq", "auto_", "fp8")
WITH_SCALES += ("fbgemm_fp8", "quark", "inc")
# Kinds of tensors that hold a layer's weights, and their scales.
MATRICES = ("weight", "weight_packed", "qweight")
SCALES = ("weight_scale", "weight_scale_inv", "scales", "qscale_weight")


def check_weights(vllm_config: "VllmConfig", drafter: DrafterConfig) -> None:
    """Refuses files that are broken, or do not fit the drafter's or target's config."""
    spec = vllm_config.speculative_config
    check_quantization(spec)
    load = spec.draft_load_config or vllm_config.load_config
    num_rows = drafter.checkpoint_vocab_size
    if num_rows is not None and load.load_format == STREAMED:
        raise ValueError(
            f"{spec.model} has {num_rows} tokens and the target another number, and "
            f'load_format="{STREAMED}" cannot pad or cut it: set draft_load_config of '
            'speculative_config to {"load_format": "auto"}.'
        )
    if load.load_format not in FROM_FILES:
        return
    folder = _local_folder(spec)
    tensors = {} if folder is None else read_headers(folder)
    if not tensors:
        if folder and not {".bin", ".pt"} & {file.suffix for file in folder.iterdir()}:
            raise ValueError(
                f"{MODEL}: {folder} holds no weights: {AGAIN}, or name a folder with "
                "model.safetensors."
            )
        return
    check_scales(spec.draft_model_config, tensors)
    arch = spec.draft_model_config.architectures[0]
    if arch in {"eagle3": HEADS, "draft_model": DENSE}.get(spec.method, ()):
        check_tensors(spec, tensors, num_rows)


def _local_folder(spec: "SpeculativeConfig") -> Path | None:
    """A checkpoint's local folder; None if it has none, or is a single file."""
    if (path := Path(spec.model)).exists():
        return path if path.is_dir() else None
    from huggingface_hub import snapshot_download

    try:
        found = Path(
            snapshot_download(spec.model, revision=spec.revision, local_files_only=True)
        )
    except (OSError, ValueError):
        return None
    # Only a complete checkpoint can be checked: shards may yet have to be downloaded.
    is_whole = any(found.glob("*.safetensors")) and not (found / INDEX).exists()
    return found if is_whole else None


# Quantization.


def is_quantized_in_files(draft: "ModelConfig") -> bool:
    """Whether a checkpoint holds quantized weights; false for online quantization."""
    return draft.quantization is not None and not _is_online(draft)


def stores_scales(draft: "ModelConfig") -> bool:
    """Whether a checkpoint holds quantized weights beside their scales.

    Others quantize plain weights while they load, or pack scales into other tensors.
    """
    return is_quantized_in_files(draft) and draft.quantization.startswith(WITH_SCALES)


def _is_online(draft: "ModelConfig") -> bool:
    from vllm.config.quantization import ONLINE_QUANT_SHORTHAND_NAMES

    names = (*ONLINE_QUANT_SHORTHAND_NAMES, "fp8")  # "fp8" is deprecated
    is_in_files = draft.model_arch_config.quantization_config is not None
    return draft.quantization in names and not is_in_files


def check_quantization(spec: "SpeculativeConfig") -> None:
    """Refuses settings that cannot quantize a drafter at loading."""
    draft, lm_head = spec.draft_model_config, spec.draft_lm_head_quantization
    if not is_known_kv_cache_dtype(spec.kv_cache_dtype or "auto"):
        raise ValueError(
            f'kv_cache_dtype="{spec.kv_cache_dtype}" of speculative_config is not one '
            f"of {', '.join(KV_CACHE_DTYPES)}: correct it, or leave it out."
        )
    setting = f'quantization="{draft.quantization}"' if _is_online(draft) else None
    setting = setting or (lm_head and "draft_lm_head_quantization")
    if setting and draft.dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(
            f"{setting} of speculative_config does not support {draft.dtype}: set "
            "--dtype bfloat16, or unset it."
        )
    if lm_head == "nvfp4" and not current_platform.is_cuda():
        raise ValueError(
            'draft_lm_head_quantization="nvfp4" needs an NVIDIA GPU: use "fp8".'
        )


def check_scales(draft: "ModelConfig", tensors: Mapping[str, Tensor]) -> None:
    """Refuses quantized weights without their scales, and the reverse."""
    if draft.quantization is not None and not stores_scales(draft):
        return
    layers: dict[str, dict[str, str]] = {}
    for name, tensor in tensors.items():
        layer, _, kind = name.rpartition(".")
        layers.setdefault(layer, {})[kind] = tensor.dtype
    for layer, dtypes in layers.items():
        is_quantized = any(dtypes.get(kind, PLAIN[0]) not in PLAIN for kind in MATRICES)
        has_scale = not dtypes.keys().isdisjoint(SCALES)
        if is_quantized and draft.quantization is None:
            raise ValueError(
                f"{layer} of {draft.model} has quantized weights, but its config.json "
                f"has no quantization_config: add it, or {AGAIN}."
            )
        if is_quantized != has_scale:
            lacks = "scale" if is_quantized else "quantized weights"
            has = "quantized weights" if is_quantized else "a scale"
            raise ValueError(
                f"{layer} of {draft.model} has {has}, but no {lacks}: {AGAIN}."
            )


# Tensors.


class Expected(NamedTuple):
    """A tensor that a drafter has by its config.

    Attributes:
        name: without "model.".
        shape: a single number stands for as many values in any shape.
        by: the config keys that it follows from.
        why: why the drafter needs it; None: it may lack it.
    """

    name: str
    shape: tuple[int, ...]
    by: str
    why: str | None = None


def check_tensors(
    spec: "SpeculativeConfig", tensors: Mapping[str, Tensor], num_rows: int | None
) -> None:
    """Refuses tensors of other shapes or layers than its config says, or of another
    kind of drafter; and checks the values of d2t.

    Args:
        num_rows: of the embeddings, before they are padded or cut to the target's.
    """
    tensors = {name.removeprefix("model."): t for name, t in tensors.items()}
    draft = spec.draft_model_config
    rows = num_rows or draft.hf_text_config.vocab_size
    expected = [*_of_model(spec, rows)]
    if spec.method == "eagle3":
        expected += _of_head(spec, rows)
    for each in expected:
        if each.why is not None and each.name not in tensors:
            raise ValueError(f"{spec.model} has no tensor {each.name}: {each.why}.")
    for name, shape, by, _ in expected:
        # Packed quantized weights have other shapes.
        is_packed = len(shape) > 1 and is_quantized_in_files(draft)
        if (tensor := tensors.get(name)) is None or is_packed:
            continue
        found = tensor.shape
        if name == "mask_hidden":  # published with leading dimensions of 1
            found = (math.prod(found),)
        if found != shape:
            raise ValueError(
                f"{name} of {spec.model} has shape {list(tensor.shape)}, but by {by} "
                f"it is {list(shape)}: correct config.json, {AGAIN}, or use a drafter "
                "that was trained for this target."
            )
    if spec.method == "eagle3" and (table := tensors.get("d2t")):
        with safe_open(table.file, "pt") as file:
            offsets = file.get_tensor(table.name)
        is_whole = _drafts_all(draft.hf_text_config)
        num_tokens = spec.target_model_config.get_vocab_size()
        check_token_offsets(offsets, spec.model, num_tokens, is_whole)
    matches = filter(None, map(LAYER.match, tensors))
    layers = {int(match[1] or 0) for match in matches}
    if layers != set(range(depth := draft.hf_text_config.num_hidden_layers)):
        raise ValueError(
            f"{spec.model} has the layers {sorted(layers)}, but num_hidden_layers in "
            f"its config.json is {depth}: correct it, or {AGAIN}."
        )


def _of_head(spec: "SpeculativeConfig", num_rows: int) -> Iterator[Expected]:
    """What an EAGLE-3 head has besides."""
    draft, target = spec.draft_model_config, spec.target_model_config
    config, width = draft.hf_text_config, target.get_hidden_size()
    is_quantized = is_quantized_in_files(draft)
    number = getattr(config, "num_aux_hidden_states", None) or 3
    fed = f"{number} layers of the target's hidden size ({width})"
    hidden, why = config.hidden_size, None
    if takes_aux_hidden_states(config) and not is_quantized:
        yield Expected(
            "fc.weight",
            (hidden, number * width),
            f"its hidden_size and {fed}",
            "it is not an EAGLE-3 head; with a draft model of its own vocabulary and "
            'embeddings set "method": "draft_model"',
        )
    if spec.parallel_drafting:
        yield Expected(
            "mask_hidden",
            (number * width,),
            fed,
            "parallel drafting needs it; use a P-EAGLE checkpoint, or set "
            "parallel_drafting=false",
        )
    if not _drafts_all(config):
        num_rows, num_tokens = config.draft_vocab_size, target.get_vocab_size()
        why = f"it drafts {num_rows} of the target's {num_tokens} tokens; {AGAIN}"
    by = "draft_vocab_size and hidden_size in its config.json"
    yield Expected("d2t", (num_rows,), by, why)
    why_rows = None if is_quantized else why
    yield Expected("lm_head.weight", (num_rows, hidden), by, why_rows)


def _of_model(spec: "SpeculativeConfig", num_rows: int) -> Iterator[Expected]:
    """What heads and language models have: embeddings."""
    width = spec.target_model_config.get_hidden_size()
    config, why = spec.draft_model_config.hf_text_config, None
    if spec.method == "eagle3" and config.hidden_size != width:
        why = (
            f"it cannot use the target's, since its hidden_size ({config.hidden_size}) "
            f"is not the target's ({width}); {AGAIN}"
        )
    by = "vocab_size and hidden_size in its config.json"
    yield Expected("embed_tokens.weight", (num_rows, config.hidden_size), by, why)


def _drafts_all(config: Any) -> bool:
    """Whether a head drafts every token of its vocabulary."""
    return getattr(config, "draft_vocab_size", None) in (None, config.vocab_size)


def check_token_offsets(
    offsets: torch.Tensor, model: str, num_target_tokens: int, is_whole: bool
) -> None:
    """Refuses a table `d2t` that names tokens that the target lacks, or reorders the
    whole vocabulary. The head's token i is the target's i + offsets[i].

    Args:
        offsets: [tokens of the head], of any integer dtype.
        model: name of the head, for errors.
        num_target_tokens: size of the target's vocabulary.
        is_whole: whether the head drafts every token, for which vLLM uses no table.
    """
    # In NumPy, since engines are forked from the process that checks this: had PyTorch
    # run a parallel loop in it, they would hang at their first one.
    shifts = np.array(offsets.tolist()).astype(np.int64)
    tokens = np.arange(len(shifts)) + shifts
    least, most = tokens.min(), tokens.max()
    # With the whole vocabulary there may be more rows than the target has: padding.
    if not is_whole and (least < 0 or most >= num_target_tokens):
        raise ValueError(
            f"d2t of {model} names tokens from {least} to {most}, but the target has "
            f"{num_target_tokens}: use a head that was trained for this target."
        )
    if is_whole and shifts.any():
        raise ValueError(
            f"d2t of {model} names all tokens in another order: it must hold offsets, "
            "the target's id less the head's own; export the checkpoint again."
        )
    if (twice := len(tokens) - len(np.unique(tokens))) and not is_whole:
        logger.warning(
            "d2t of %s names %d of its tokens twice, and drafts are worse for it: it "
            "must hold offsets, the target's id less the head's own. Export it again.",
            model,
            twice,
        )
