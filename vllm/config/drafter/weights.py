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

from vllm.config.cache import KV_CACHE_DTYPES, is_known_kv_cache_dtype
from vllm.logger import init_logger
from vllm.platforms import current_platform

from .drafter import DrafterConfig
from .families import AGAIN, takes_aux_hidden_states, tapped_layers
from .files import INDEX, MODEL, Tensor, read_headers

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
MOST_NAMED = 8  # of the missing tensors, in an error
CORRECT = f"correct them, or {AGAIN}"


def check_weights(vllm_config: "VllmConfig", drafter: DrafterConfig) -> None:
    """Refuses files that are broken, or do not fit the drafter's or target's config."""
    spec = vllm_config.speculative_config
    check_quantization(spec)
    _check_load_format(vllm_config, drafter.checkpoint_vocab_size)
    load = spec.draft_load_config or vllm_config.load_config
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
        _Weights(spec, tensors, drafter.checkpoint_vocab_size).check()


def _check_load_format(vllm_config: "VllmConfig", vocab_size: int | None) -> None:
    from vllm.model_executor.model_loader import get_model_loader

    spec = vllm_config.speculative_config
    try:
        if spec.draft_load_config is not None:
            get_model_loader(spec.draft_load_config)
    except ValueError as error:
        raise ValueError(
            f'draft_load_config: {error}: set "load_format" to "auto", or leave '
            "draft_load_config unset."
        ) from None
    load = spec.draft_load_config or vllm_config.load_config
    if vocab_size is not None and load.load_format == STREAMED:
        raise ValueError(
            f"{spec.model} has {vocab_size} tokens and the target another number, and "
            f'load_format="{STREAMED}" cannot pad or cut it: set draft_load_config of '
            'speculative_config to {"load_format": "auto"}.'
        )


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
    """Refuses settings that cannot quantize a drafter, or nothing of it, at loading."""
    draft, lm_head = spec.draft_model_config, spec.draft_lm_head_quantization
    if not is_known_kv_cache_dtype(spec.kv_cache_dtype or "auto"):
        raise ValueError(
            f'kv_cache_dtype="{spec.kv_cache_dtype}" of speculative_config is not one '
            f"of {', '.join(KV_CACHE_DTYPES)}: correct it, or leave it out."
        )
    is_online = _is_online(draft)
    if is_online and _quantizes_nothing(draft):
        raise ValueError(
            f'quantization="{draft.quantization}" of speculative_config quantizes '
            f'nothing of {draft.model}: write for example "fp8_per_channel".'
        )
    setting = f'quantization="{draft.quantization}"' if is_online else None
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


def _quantizes_nothing(draft: "ModelConfig") -> bool:
    from vllm.config.quantization import resolve_quantization_config

    name = "fp8_per_tensor" if draft.quantization == "fp8" else draft.quantization
    found = resolve_quantization_config(name, None)
    # None for names that are also checkpoint formats, which cannot be checked here.
    is_of_experts = found is not None and found.linear is None and not draft.is_moe
    return name == "online" or is_of_experts


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
        remedy: for another shape.
    """

    name: str
    shape: tuple[int, ...]
    by: str
    why: str | None = None
    remedy: str = CORRECT


class _Weights:
    """A drafter's tensors, and what its config says of them.

    Args:
        num_rows: of the embeddings, before they are padded or cut to the target's.
    """

    def __init__(
        self,
        spec: "SpeculativeConfig",
        tensors: Mapping[str, Tensor],
        num_rows: int | None,
    ) -> None:
        self.spec, self.model = spec, spec.model
        self.tensors = {name.removeprefix("model."): t for name, t in tensors.items()}
        self.config: Any = spec.draft_model_config.hf_text_config
        self.num_rows = num_rows or self.config.vocab_size
        target = spec.target_model_config
        self.target_width = target.get_hidden_size()
        self.num_target_tokens = target.get_vocab_size()
        # Packed quantized weights have other shapes.
        self.is_quantized = is_quantized_in_files(spec.draft_model_config)
        reduced = getattr(self.config, "draft_vocab_size", None)
        self.num_drafted = reduced or self.config.vocab_size
        self.drafts_all = self.num_drafted == self.config.vocab_size

    def check(self) -> None:
        """Checks which tensors there are, their shapes, and the values of d2t."""
        is_head = self.spec.method == "eagle3"
        expected = [*(self._of_head() if is_head else ()), *self._of_model()]
        whys = {each.name: each.why for each in expected if each.why}
        missing = {n: why for n, why in whys.items() if n not in self.tensors}
        refuse_missing(self.model, missing)
        for each in expected:
            self._check_tensor(each)
        self._check_layers()

    def _of_head(self) -> Iterator[Expected]:
        """What an EAGLE-3 head has besides."""
        hidden, target = self.config.hidden_size, self.target_width
        number = getattr(self.config, "num_aux_hidden_states", None)
        number = number or len(tapped_layers(self.config) or ()) or 3
        rows = self.num_rows if self.drafts_all else self.num_drafted
        fed = f"{number} layers of the target's hidden size ({target})"
        if takes_aux_hidden_states(self.config) and not self.is_quantized:
            yield Expected(
                "fc.weight",
                (hidden, number * target),
                f"its hidden_size and {fed}",
                "it is not an EAGLE-3 head; with a draft model of its own vocabulary "
                'and embeddings set "method": "draft_model"',
                "use a head that was trained for this target, or correct config.json",
            )
        if self.spec.parallel_drafting:
            yield Expected(
                "mask_hidden",
                (number * target,),
                fed,
                "parallel drafting needs it; use a P-EAGLE checkpoint, or set "
                "parallel_drafting=false",
                f"{AGAIN}, or set parallel_drafting=false",
            )
        key, in_file = "draft_vocab_size", "in its config.json"
        why_table = why_rows = None
        if not self.drafts_all:
            share = f"{self.num_drafted} of the target's {self.num_target_tokens}"
            why_table = f"it drafts {share} tokens; {AGAIN}"
            if not self.is_quantized:
                why_rows = f"its {key} is {self.num_drafted}; {AGAIN}"
        yield Expected("d2t", (rows,), f"{key} {in_file}", why_table)
        shape, keys = (rows, hidden), f"{key} and hidden_size {in_file}"
        yield Expected("lm_head.weight", shape, keys, why_rows)

    def _of_model(self) -> Iterator[Expected]:
        """What heads and language models have: embeddings and attention."""
        draft, config = self.spec.draft_model_config, self.config
        hidden, in_file, why = config.hidden_size, "in its config.json", None
        if self.spec.method == "eagle3" and hidden != self.target_width:
            why = (
                f"it cannot use the target's, since its hidden_size ({hidden}) is not "
                f"the target's ({self.target_width}); {AGAIN}"
            )
        shape, keys = (self.num_rows, hidden), f"vocab_size and hidden_size {in_file}"
        yield Expected("embed_tokens.weight", shape, keys, why)
        heads = {
            "q": ("num_attention_heads", config.num_attention_heads),
            "k": ("num_key_value_heads", draft.get_total_num_kv_heads()),
        }
        size = draft.get_head_size()
        for name, tensor in self.tensors.items():
            kind = name.removesuffix("_proj.weight").rpartition(".")[2]
            if kind in heads:
                key, number = heads[kind]
                by = f"{key} ({number}) of head_dim {size} {in_file}"
                yield Expected(name, (number * size, *tensor.shape[1:]), by)

    def _check_tensor(self, expected: Expected) -> None:
        name, shape = expected.name, expected.shape
        tensor = self.tensors.get(name)
        if tensor is None or (self.is_quantized and len(shape) > 1):
            return
        found = tensor.shape
        if name == "mask_hidden":  # published with leading dimensions of 1
            found = (math.prod(found),)
        if tuple(found) != shape:
            raise ValueError(
                f"{name} of {self.model} has shape {list(tensor.shape)}, but by "
                f"{expected.by} it is {list(shape)}: {expected.remedy}."
            )
        if name == "d2t":
            from safetensors import safe_open

            with safe_open(tensor.file, "pt") as file:
                offsets = file.get_tensor(tensor.name)
            target = self.num_target_tokens
            check_token_offsets(offsets, self.model, target, self.drafts_all)

    def _check_layers(self) -> None:
        matches = filter(None, map(LAYER.match, self.tensors))
        layers = {int(match[1] or 0) for match in matches}
        depth = self.config.num_hidden_layers
        if layers != set(range(depth)):
            raise ValueError(
                f"{self.model} has the layers {sorted(layers)}, but num_hidden_layers "
                f"in its config.json is {depth}: correct it, or {AGAIN}."
            )


def refuse_missing(model: str, missing: Mapping[str, str | None]) -> None:
    """Refuses a checkpoint without some tensors, if there are any.

    Both its headers, before weights load, and what was loaded are checked with this.

    Args:
        missing: names of the tensors, and why they are needed; None: the model that
            its config.json describes has them.
    """
    for name, why in missing.items():
        if why is not None:
            raise ValueError(f"{model} has no tensor {name}: {why}.")
    if missing:
        more = " and more" if len(missing) > MOST_NAMED else ""
        raise ValueError(
            f"{model} lacks {', '.join([*missing][:MOST_NAMED])}{more}: the checkpoint "
            "is incomplete, or its config.json is of another one."
        )


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
