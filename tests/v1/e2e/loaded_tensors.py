# SPDX-License-Identifier: Apache-2.0
"""Finds tensors of a speculator that sleep of level 2 discards, and nobody restores.

They were allocated while weights loaded, and are not part of a model. Memory of a CPU
is not discarded, but it is allocated at the same time as that of a GPU.
"""

from collections.abc import Iterable
from itertools import chain
from typing import Any

import torch
import torch.nn as nn

from vllm.v1.worker.gpu.model_runner import GPUModelRunner


class LoadedTensors:
    """Records which tensors are allocated while weights load, from now on."""

    def __init__(self) -> None:
        # By address; it is kept, so that no other tensor gets it.
        self.loaded: dict[int, torch.UntypedStorage] = {}
        load = GPUModelRunner.load_model

        def record(runner: GPUModelRunner, *args: Any, **given: Any) -> None:
            before = memory_of(tensors_of(runner.speculator, "").values())
            load(runner, *args, **given)
            after = memory_of(tensors_of(runner.speculator, "").values())
            self.loaded = {at: each for at, each in after.items() if at not in before}

        GPUModelRunner.load_model = record

    def kept_by(self, runner: GPUModelRunner) -> list[str]:
        """Names of such tensors that the speculator still has, sorted."""
        found = tensors_of(runner.speculator, "")
        models = runner.model, runner.speculator.model
        weights = [[*model.parameters(), *model.buffers()] for model in models]
        lost = self.loaded.keys() - memory_of(chain(*weights)).keys()
        return sorted(name for name, each in found.items() if address(each) in lost)


def address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def memory_of(tensors: Iterable[torch.Tensor]) -> dict[int, torch.UntypedStorage]:
    return {address(tensor): tensor.untyped_storage() for tensor in tensors}


def tensors_of(
    owner: Any, name: str, seen: dict[int, Any] | None = None
) -> dict[str, torch.Tensor]:
    """Tensors of an object and of the objects it consists of, by path; models and
    configs are left out."""
    seen = {} if seen is None else seen
    if isinstance(owner, torch.Tensor):
        return {name: owner} if owner.numel() else {}
    if id(owner) in seen or isinstance(owner, nn.Module):
        return {}
    seen[id(owner)] = owner
    found: dict[str, torch.Tensor] = {}
    for key, value in parts_of(owner).items():
        found |= tensors_of(value, f"{name}.{key}" if name else str(key), seen)
    return found


def parts_of(owner: Any) -> dict[Any, Any]:
    if isinstance(owner, tuple) and hasattr(owner, "_asdict"):
        return owner._asdict()
    if isinstance(owner, list | tuple):
        return dict(enumerate(owner))
    if isinstance(owner, dict):
        return owner
    module = type(owner).__module__
    is_ours = module.startswith("vllm.") and not module.startswith("vllm.config")
    return getattr(owner, "__dict__", {}) if is_ours else {}
