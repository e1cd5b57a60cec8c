# SPDX-License-Identifier: Apache-2.0
"""Hidden states of the target's layers, in the order in which a drafter's file lists
the layers: columns of its `fc` are in this order."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from vllm.model_executor.models.interfaces import EagleModelMixin

if TYPE_CHECKING:
    from vllm.config import SpeculativeConfig


def check_tapped(
    target: torch.nn.Module,
    layers: Iterable[int],
    drafter: str,
    inner: torch.nn.Module | None,
) -> tuple[int, ...]:
    """The ids of tapped layers as a target takes them: ascending, each once.

    Args:
        drafter: its name, for the error.
        inner: the target's decoder.

    Raises:
        ValueError: one is 0, for the embeddings, and the target's class does not have
            vLLM's common code for tapped layers. Others of its classes fail, or return
            the last layer's states.
    """
    has_embeddings = any(isinstance(m, EagleModelMixin) for m in (target, inner))
    if 0 in (wanted := sorted(set(layers))) and not has_embeddings:
        raise ValueError(
            f"{drafter} is fed layer 0 of the target, the embeddings, which in vLLM "
            f"{type(target).__name__} does not return: use another drafter."
        )
    return tuple(wanted)


def in_listed_order(
    states: list[torch.Tensor] | None, spec: "SpeculativeConfig | None"
) -> list[torch.Tensor] | None:
    """Hidden states as a drafter takes them.

    Args:
        states: as the target returns them, by ascending layer.

    Raises:
        ValueError: the target does not return those of each layer that it was asked
            for, which is seen in its first run, before it serves.
    """
    if not states or spec.method == "extract_hidden_states":
        return states
    from .eagle.eagle3_utils import get_eagle3_aux_layers_from_config

    listed = get_eagle3_aux_layers_from_config(spec)
    if not listed:
        return states  # of the target's default layers
    asked = sorted(set(listed))
    if len(states) != len(asked):
        raise ValueError(
            f"{spec.model} is fed layers {list(listed)} of the target, of which it "
            f"returns {len(states)}: use another drafter."
        )
    by_layer = dict(zip(asked, states, strict=True))
    return [by_layer[layer] for layer in listed]
