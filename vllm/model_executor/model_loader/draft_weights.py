# SPDX-License-Identifier: Apache-2.0
"""Adapts tensors of draft checkpoints to vLLM; refuses missing and unknown ones."""

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
import torch.nn as nn

from vllm.config import ModelConfig, get_current_vllm_config_or_none
from vllm.config.drafter import OWN_CHECKPOINTS
from vllm.config.drafter.weights import check_token_offsets
from vllm.logger import init_logger

logger = init_logger(__name__)

# vLLM's error for a tensor without a place in the model: its name, or the first part.
UNKNOWN = re.compile(r"There is no module or parameter named '(.*?)' in ")
MOST_NAMED = 8  # of the missing tensors, in an error
NamedTensor = tuple[str, torch.Tensor]


class DraftWeights:
    """The tensors of one draft model while it loads.

    Attributes:
        has_ids: whether the model is an EAGLE-3 head, which may have `d2t`.
        seen: names of the tensors so far, as in the checkpoint except for what
            `head_name` unifies.
    """

    def __init__(self, model: nn.Module, model_config: ModelConfig):
        self.model, self.config = model, model_config.hf_text_config
        self.path, self.is_quantized = model_config.model, model_config.quantization
        config = get_current_vllm_config_or_none()
        self.spec = config.speculative_config if config else None
        self.has_ids = hasattr(model, "draft_id_to_target_id")
        self.seen: set[str] = set()

    # Names and shapes.

    def adapted(self, weights: Iterable[NamedTensor]) -> Iterator[NamedTensor]:
        """Each tensor with the name and the number of rows that vLLM expects."""
        for name, tensor in weights:
            if self.has_ids:
                name = head_name(name)
                if name == "d2t":
                    is_whole = self.model.draft_id_to_target_id is None
                    vocab_size = self.config.vocab_size
                    check_token_offsets(tensor, self.path, vocab_size, is_whole)
                    if is_whole:
                        continue  # ids are the target's: vLLM has no table
            self.seen.add(name)
            yield name, self._with_target_rows(name, tensor)

    def _with_target_rows(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Pads or cuts a vocabulary to the target's, see `config.drafter.target`.

        The last row is repeated: it is padding itself, and of equal logits the first
        wins, so this never changes what is drafted.
        """
        own = self.spec.drafter.checkpoint_vocab_size if self.spec else None
        is_vocabulary = name.rpartition(".")[0].endswith(("embed_tokens", "lm_head"))
        if own is None or not is_vocabulary or len(tensor) != own:
            return tensor
        missing = self.config.vocab_size - own
        if missing <= 0:
            return tensor[: self.config.vocab_size]
        return torch.cat([tensor, tensor[-1:].repeat_interleave(missing, dim=0)])

    # What was not loaded.

    @contextmanager
    def checked(self) -> Iterator[None]:
        """Refuses a checkpoint, loaded within, that lacks a tensor of the model, or has
        one for which the model has no place."""
        if self.spec is None or self.spec.method not in OWN_CHECKPOINTS:
            yield  # checkpoints of other methods omit what the target has
            return
        for _, parameter in self._parameters():
            parameter.data.fill_(_mark(parameter.dtype))
        try:
            yield
        except ValueError as error:
            if (unknown := UNKNOWN.match(str(error))) is None:
                raise
            start = unknown[1].removeprefix("model.")
            names = {n for n in self.seen if n.removeprefix("model.").startswith(start)}
            raise ValueError(
                f"{self.path} has a tensor {min(names, default=start)}, for which the "
                "model that its config.json describes has no place: correct "
                "config.json, or use a checkpoint of another kind."
            ) from None
        is_head = self.spec.method != "draft_model"
        if missing := sorted({*self._missing(is_head)}):
            more = " and more" if len(missing) > MOST_NAMED else ""
            raise ValueError(
                f"{self.path} lacks {', '.join(missing[:MOST_NAMED])}{more}: the "
                "checkpoint is incomplete, or its config.json is of another one."
            )

    def _parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Parameters that only a checkpoint fills; not those of quantized modules, some
        of which are derived from others or have defaults."""
        for path, module in self.model.named_modules():
            if self._is_plain(module):
                yield from module.named_parameters(path, recurse=False)

    def _is_plain(self, module: nn.Module) -> bool:
        method = type(getattr(module, "quant_method", None)).__name__
        return not self.is_quantized or method.startswith(("NoneType", "Unquantized"))

    def _missing(self, is_head: bool) -> Iterator[str]:
        """Names of the tensors that were not loaded; a head may lack some. Those of
        quantized layers are checked before, see `weights.check_scales`."""
        for name, parameter in self._parameters():
            if _is_unwritten(parameter) and not (is_head and self._may_lack(name)):
                # Other models may have other names: then the parameter's is given.
                lacks = [part for part in self._parts(name) if part not in self.seen]
                yield from lacks or [name]

    def _may_lack(self, name: str) -> bool:
        """Whether a head shares the parameter with the target, or does not use it."""
        if name.startswith("lm_head."):
            return getattr(self.model, "draft_id_to_target_id", None) is None
        unused = re.search(r"\.layers\.[1-9]\d*\.hidden_norm\.", name)
        return ".embed_tokens." in name or unused is not None

    def _parts(self, name: str) -> list[str]:
        """Names of a model's parameter in a checkpoint."""
        if self.has_ids:
            name = head_name(name).replace("draft_id_to_target_id", "d2t")
        packed = getattr(self.model, "packed_modules_mapping", {})
        for whole, parts in packed.items():
            if f".{whole}." in name:
                return [name.replace(whole, part) for part in parts]
        return [name]


def head_name(name: str) -> str:
    """The name of a head's tensor, with one name for its only or first layer."""
    name = name.removeprefix("model.")
    name = re.sub(r"^midlayer\.(?=\d)", "layers.", name)
    return re.sub(r"^midlayer\.", "layers.0.", name)


def _mark(dtype: torch.dtype) -> float | int:
    return float("nan") if dtype.is_floating_point else torch.iinfo(dtype).min


def _is_unwritten(parameter: torch.Tensor) -> bool:
    """Whether some row still holds the mark; a tensor of a file fills whole rows."""
    first = parameter.data.select(-1, 0) if parameter.dim() > 1 else parameter.data
    if first.dtype.is_floating_point:
        return bool(first.isnan().any())
    return bool((first == _mark(first.dtype)).any())


def checks_draft_weights(load_weights: Callable[..., None]) -> Callable[..., None]:
    """Decorates a loader's `load_weights`: the tensors of a draft model are adapted to
    vLLM, and all of them must be loaded."""

    @wraps(load_weights)
    def checked(loader: Any, model: nn.Module, model_config: ModelConfig) -> None:
        if model_config.runner_type != "draft":
            return load_weights(loader, model, model_config)
        draft, get_weights = DraftWeights(model, model_config), loader.get_all_weights
        loader.get_all_weights = lambda *args: draft.adapted(get_weights(*args))
        try:
            with draft.checked():
                load_weights(loader, model, model_config)
        finally:
            del loader.get_all_weights

    return checked
