# SPDX-License-Identifier: Apache-2.0
"""Builds each layer of a quantized drafter as its file has it.

The file's tensors say which layers are quantized, and its quantization config how, by
name, pattern or class. It names layers as the file does, not as vLLM does: there a
draft model's names begin with "draft_model.", the layers of a head are numbered after
the target's, and projections are merged.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import wraps

import torch.nn as nn

from vllm.config import VllmConfig
from vllm.config.drafter import OWN_CHECKPOINTS
from vllm.config.drafter.files import Tensor, find_tensors
from vllm.config.drafter.weights import PLAIN, stores_scales
from vllm.model_executor.layers.quantization.base_config import (
    QuantizationConfig,
    QuantizeMethodBase,
)

from .draft_weights import head_name

DRAFT_MODEL = "draft_model"  # the first part of the names in a draft model
EMBEDDINGS = "embed_tokens"


class FileLayers:
    """The layers in a drafter's file.

    Attributes:
        packed: names of the projections that vLLM merges, by that of the whole.
        tensors: by layer and kind, such as "weight". Layers have vLLM's names, without
            what it puts in front, and with a head's numbers.
    """

    def __init__(self, vllm_config: VllmConfig, model_class: type[nn.Module]) -> None:
        spec, target = vllm_config.speculative_config, vllm_config.model_config
        draft = spec.draft_model_config
        self.path, self.is_head = draft.model, spec.method != DRAFT_MODEL
        self.num_before = (
            target.get_total_num_hidden_layers()
            if spec.method == "eagle3"
            else target.get_num_layers(vllm_config.parallel_config)
        )
        self.packed: Mapping[str, list[str]] = getattr(
            model_class, "packed_modules_mapping", {}
        )
        mapper = getattr(model_class, "hf_to_vllm_mapper", None)
        rename = mapper.get_rename_mapper().map_name if mapper else str
        if self.is_head:
            rename = head_name
        self.tensors: dict[str, dict[str, Tensor]] = defaultdict(dict)
        for name, tensor in find_tensors(draft.model, draft.revision).items():
            layer, _, kind = rename(name).rpartition(".")
            self.tensors[layer][kind] = tensor

    def name(self, prefix: str) -> str:
        """A layer's key in `tensors`, if it is not merged, by its prefix in vLLM."""
        if not self.is_head:
            return prefix.removeprefix(f"{DRAFT_MODEL}.")
        return re.sub(
            r"^layers\.(\d+)",
            lambda match: f"layers.{int(match[1]) - self.num_before}",
            prefix.removeprefix("model."),
        )

    def _parts(self, name: str) -> dict[str, dict[str, Tensor]]:
        """The tensors of a layer, or of the parts that it is merged from."""
        start, _, last = name.rpartition(".")
        names = [name]
        if name not in self.tensors:
            names = [f"{start}.{part}" for part in self.packed.get(last, ())]
            if last == "lm_head":  # tied
                names = [other for other in self.tensors if other.endswith(EMBEDDINGS)]
        return {part: self.tensors[part] for part in names if part in self.tensors}

    def is_plain(self, name: str) -> bool:
        """Whether the file has a layer with weights that are not quantized.

        Raises:
            ValueError: it has some of its parts quantized, and others not.
        """
        by_plainness: dict[bool, list[str]] = defaultdict(list)
        for part, tensors in self._parts(name).items():
            weight = tensors.get("weight")
            by_plainness[weight is not None and weight.dtype in PLAIN].append(part)
        if len(by_plainness) > 1:
            raise ValueError(
                f"{self.path} has {', '.join(by_plainness[False])} quantized, but not "
                f"{', '.join(by_plainness[True])}, and vLLM merges them: quantize all "
                "of them or none."
            )
        return True in by_plainness

    def in_file(self, name: str) -> str:
        """The name that the quantization config has for a layer."""
        found = [*self._parts(name).values()] if self.is_head else []
        if not found:
            return name
        tensor = next(iter(found[0].values()))
        layer, last = tensor.name.rpartition(".")[0], name.rpartition(".")[2]
        return layer[: layer.rfind(".") + 1] + last


def reads_draft_files(
    get_config: Callable[[VllmConfig], QuantizationConfig | None],
) -> Callable[[VllmConfig], QuantizationConfig | None]:
    """Decorates `get_draft_quant_config`: the config then takes vLLM's names."""

    @wraps(get_config)
    def get_by_files(vllm_config: VllmConfig) -> QuantizationConfig | None:
        config, spec = get_config(vllm_config), vllm_config.speculative_config
        if (
            config is not None
            and spec.method in OWN_CHECKPOINTS
            and stores_scales(spec.draft_model_config)
        ):
            _look_into_file(config, vllm_config)
        return config

    return get_by_files


def _look_into_file(config: QuantizationConfig, vllm_config: VllmConfig) -> None:
    from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
    from vllm.model_executor.model_loader.utils import get_model_cls

    draft = vllm_config.speculative_config.draft_model_config
    layers = FileLayers(vllm_config, get_model_cls(draft))
    by_config = config.get_quant_method

    def get_quant_method(layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        name = layers.name(prefix)
        if layers.is_plain(name):
            return UnquantizedLinearMethod() if isinstance(layer, LinearBase) else None
        return by_config(layer, layers.in_file(name))

    config.packed_modules_mapping = dict(layers.packed)
    # On the instance, since models ask for the class of their config.
    config.get_quant_method = get_quant_method  # type: ignore[method-assign]
