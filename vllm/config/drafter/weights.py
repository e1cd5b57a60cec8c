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
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from vllm.logger import init_logger

from .drafter import DrafterConfig
from .families import AGAIN, takes_aux_hidden_states, tapped_layers
from .files import INDEX, MODEL, Tensor, read_headers
from .target import is_quantized_in_files

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
MOST_NAMED = 8  # of the missing tensors, in an error
SCALES = ("weight_scale", "weight_scale_inv", "scales", "qscale_weight")


def check_weights(vllm_config: "VllmConfig", drafter: DrafterConfig) -> None:
    """Checks a drafter's files against its config and the target's.

    Raises:
        ValueError: they are broken, or do not fit the configs.
    """
    spec = vllm_config.speculative_config
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
    weights = _Weights(spec, tensors, drafter.checkpoint_vocab_size)
    arch = spec.draft_model_config.architectures[0]
    is_head = spec.method == "eagle3" and arch in HEADS
    if is_head:
        weights.check_head()
    if is_head or (spec.method == "draft_model" and arch in DENSE):
        weights.check_model()


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
        found = snapshot_download(
            spec.model, revision=spec.revision, local_files_only=True
        )
    except (OSError, ValueError):
        return None
    # Only a complete checkpoint can be checked: shards may yet have to be downloaded.
    has_weights = any(Path(found).glob("*.safetensors"))
    return Path(found) if has_weights and not (Path(found) / INDEX).exists() else None


def stores_scales(draft: "ModelConfig") -> bool:
    """Whether a checkpoint holds quantized weights beside their scales.

    Others quantize plain weights while they load, or pack scales into other tensors.
    """
    return is_quantized_in_files(draft) and draft.quantization.startswith(WITH_SCALES)


def check_scales(draft: "ModelConfig", tensors: dict[str, Tensor]) -> None:
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


class _Weights:
    """A drafter's tensors, and checks of their shapes against its config.

    Args:
        num_rows: of the embeddings, before they are padded or cut to the target's.
    """

    def __init__(
        self,
        spec: "SpeculativeConfig",
        tensors: dict[str, Tensor],
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
        number = getattr(self.config, "num_aux_hidden_states", None)
        # Layers of the target that an EAGLE-3 head is fed.
        self.num_layers_fed = number or len(tapped_layers(self.config) or ()) or 3
        reduced = getattr(self.config, "draft_vocab_size", None)
        self.num_drafted = reduced or self.config.vocab_size
        self.drafts_all = self.num_drafted == self.config.vocab_size

    def check_model(self) -> None:
        """Checks what a language model has: embeddings, layers, attention."""
        self._check_shape(
            "embed_tokens.weight",
            ("vocab_size", self.num_rows),
            ("hidden_size", self.config.hidden_size),
        )
        self._check_layers()
        self._check_attention()

    def check_head(self) -> None:
        """Checks what an EAGLE-3 head has besides."""
        lacking = {n: w for n, w in self._needed() if n not in self.tensors}
        refuse_missing(self.model, lacking)
        if takes_aux_hidden_states(self.config) and not self.is_quantized:
            self._check_fc()
        if self.spec.parallel_drafting:
            self._check_mask_hidden()
        if "d2t" in self.tensors:
            self._check_d2t(self.tensors["d2t"])
        self._check_shape(
            "lm_head.weight",
            ("draft_vocab_size", self._num_head_rows),
            ("hidden_size", self.config.hidden_size),
        )

    def _needed(self) -> Iterator[tuple[str, str]]:
        """Names of the tensors that a head cannot do without, and why."""
        hidden = self.config.hidden_size
        if takes_aux_hidden_states(self.config) and not self.is_quantized:
            yield (
                "fc.weight",
                "it is not an EAGLE-3 head; with a draft model of its own vocabulary "
                'and embeddings set "method": "draft_model"',
            )
        if self.spec.parallel_drafting:
            yield (
                "mask_hidden",
                "parallel drafting needs it; use a P-EAGLE checkpoint, or set "
                "parallel_drafting=false",
            )
        if hidden != self.target_width:
            yield (
                "embed_tokens.weight",
                f"it cannot use the target's, since its hidden_size ({hidden}) is not "
                f"the target's ({self.target_width}); {AGAIN}",
            )
        if not self.drafts_all:
            all_tokens = f"{self.num_drafted} of the target's {self.num_target_tokens}"
            yield "d2t", f"it drafts {all_tokens} tokens; {AGAIN}"
            if not self.is_quantized:
                yield (
                    "lm_head.weight",
                    f"its draft_vocab_size is {self.num_drafted}; {AGAIN}",
                )

    @property
    def _num_head_rows(self) -> int:
        return self.num_rows if self.drafts_all else self.num_drafted

    def _check_shape(self, name: str, *sizes: tuple[str, int]) -> None:
        """Compares a tensor's shape, if it exists, with sizes from config keys."""
        tensor = self.tensors.get(name)
        expected = tuple(size for _, size in sizes)
        if tensor is None or self.is_quantized or tensor.shape == expected:
            return
        keys = " and ".join(key for key, _ in sizes)
        raise ValueError(
            f"{name} of {self.model} has shape {list(tensor.shape)}, but {keys} in its "
            f"config.json make it {list(expected)}: correct them, or {AGAIN}."
        )

    def _check_layers(self) -> None:
        matches = filter(None, map(LAYER.match, self.tensors))
        layers = {int(match[1] or 0) for match in matches}
        depth = self.config.num_hidden_layers
        if layers != set(range(depth)):
            raise ValueError(
                f"{self.model} has the layers {sorted(layers)}, but num_hidden_layers "
                f"in its config.json is {depth}: correct it, or {AGAIN}."
            )

    def _check_attention(self) -> None:
        """Compares the rows of q and k projections with the config's head counts."""
        draft, config = self.spec.draft_model_config, self.config
        head = draft.get_head_size()
        rows = {
            "q": ("num_attention_heads", config.num_attention_heads),
            "k": ("num_key_value_heads", draft.get_total_num_kv_heads()),
        }
        for name, tensor in self.tensors.items():
            kind = name.removesuffix("_proj.weight").rpartition(".")[2]
            key, heads = rows.get(kind, ("", 0))
            if heads and tensor.shape[0] != heads * head and not self.is_quantized:
                raise ValueError(
                    f"{name} of {self.model} has {tensor.shape[0]} rows, but {key} "
                    f"({heads}) of head_dim {head} in its config.json make it "
                    f"{heads * head}: correct them, or {AGAIN}."
                )

    def _check_fc(self) -> None:
        hidden, number = self.config.hidden_size, self.num_layers_fed
        shape = self.tensors["fc.weight"].shape
        expected = (hidden, number * self.target_width)
        if shape != expected:
            raise ValueError(
                f"fc.weight of {self.model} has shape {list(shape)}, but its "
                f"hidden_size and {number} layers of the target's hidden size "
                f"({self.target_width}) make it {list(expected)}: use a head that was "
                "trained for this target, or correct config.json."
            )

    def _check_mask_hidden(self) -> None:
        shape = self.tensors["mask_hidden"].shape
        width = self.num_layers_fed * self.target_width
        if math.prod(shape) != width:
            raise ValueError(
                f"mask_hidden of {self.model} has shape {list(shape)}, but fc takes "
                f"{width} values: {AGAIN}, or set parallel_drafting=false."
            )

    def _check_d2t(self, table: Tensor) -> None:
        rows = self._num_head_rows
        if table.shape != (rows,):
            raise ValueError(
                f"d2t of {self.model} must hold {rows} integers (draft_vocab_size), "
                f"but has shape {list(table.shape)}: {AGAIN}."
            )
        from safetensors import safe_open

        with safe_open(table.file, "pt") as file:
            offsets = file.get_tensor(table.name)
        target = self.num_target_tokens
        check_token_offsets(offsets, self.model, target, self.drafts_all)


def refuse_missing(model: str, missing: Mapping[str, str | None]) -> None:
    """Refuses a checkpoint without some tensors, if there are any.

    Both its headers, before weights load, and what was loaded are checked with this.

    Args:
        missing: names of the tensors, and why they are needed; None: the model that
            its config.json describes has them.

    Raises:
        ValueError: names the first one that is needed for a reason, or all.
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
    """Checks the table `d2t` of a head: its token i is the target's i + offsets[i].

    Args:
        offsets: [tokens of the head], of any integer dtype.
        model: name of the head, for errors.
        num_target_tokens: size of the target's vocabulary.
        is_whole: whether the head drafts every token, for which vLLM uses no table.

    Raises:
        ValueError: the table names tokens that the target lacks, or reorders the whole
            vocabulary.
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
