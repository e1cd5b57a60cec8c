# SPDX-License-Identifier: Apache-2.0
"""The target's hidden states that a PARD-2 drafter is fed, where it fits the target.

PARD-2 is a language model that drafts as PARD does. Beside it lies `warp_model.bin`: a
projection of some of the target's hidden states, which are added to the embeddings.
Without them it drafts all the same, but less well.
"""

from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any

import torch

from vllm.logger import init_logger

from .files import AGAIN

if TYPE_CHECKING:
    from vllm.config.speculative import SpeculativeConfig

logger = init_logger(__name__)

WARP = "warp_model.bin"
WEIGHT, BIAS = "target_proj.weight", "target_proj.bias"
# What some checkpoints call a key.
OLD_NAMES = {
    "pard2_scale": ("feat_scale", "pard_scale"),
    "pard2_target_dim": ("pard_target_dim",),
    "pard2_target_layers": ("target_layers",),
    "pard2_proj_bias": ("proj_bias",),
    "pard2_ml": ("ml",),
}
MANY_LAYERS = [-1, -8, -16, -24]


@dataclass(frozen=True)
class TargetFeatures:
    """What a drafter is fed of the target.

    Attributes:
        layers: whose states stand side by side, in this order. Layer i is the stream
            that enters layer i of the target; `depth` is the state after its last norm.
        depth: layers of the target.
        scale: of the projection, as it is added to the embeddings.
        warp: file with the projection.
    """

    layers: tuple[int, ...]
    depth: int
    scale: float
    warp: Path

    @property
    def tapped(self) -> tuple[int, ...]:
        """Layers that the target has to hand out: all but its output."""
        return tuple(sorted({layer for layer in self.layers if layer != self.depth}))


class _Unfit(Exception):
    """Why a drafter cannot be fed, and what to do about it."""


def find_target_features(
    spec: "SpeculativeConfig", family: str | None
) -> TargetFeatures | None:
    """What a PARD-2 drafter is fed; None if it is another, or drafts without.

    Raises:
        ValueError: the projection's file is broken or is not what the config says.
    """
    if family != "PARD-2":
        return None
    try:
        features = _read(spec)
    except _Unfit as why:
        say_without_target(spec.model, str(why))
        return None
    # Where vLLM looks for the layers that the target hands out.
    config = spec.draft_model_config.hf_config
    config.eagle_aux_hidden_state_layer_ids = list(features.tapped)
    return features


def say_without_target(model: str, why: str) -> None:
    logger.warning(
        "%s drafts without the target's hidden states, from which a PARD-2 drafter "
        "drafts better: %s.",
        model,
        why,
    )


def _read(spec: "SpeculativeConfig") -> TargetFeatures:
    draft, target = spec.draft_model_config, spec.target_model_config
    warp = _find_warp(spec)
    if warp is None:
        raise _Unfit(f"it has no {WARP}. Download that file too")
    tensors = load_warp(warp)
    config = draft.hf_config
    has_bias = BIAS in tensors
    if _get(config, "pard2_proj_bias", default=has_bias) != has_bias:
        raise ValueError(
            f"pard2_proj_bias in {spec.model}/config.json contradicts {warp}, which "
            f"has {'a' if has_bias else 'no'} {BIAS}: correct it, or {AGAIN}."
        )
    depth, width = target.get_total_num_hidden_layers(), target.get_hidden_size()
    named, fed = _layers(config), tuple(tensors[WEIGHT].shape)
    if not all(-depth - 1 <= layer <= depth for layer in named):
        raise _Unfit(
            f"it is fed layers {named}, and the target has {depth}. Use a drafter that "
            "was trained for this target"
        )
    wanted = (draft.get_hidden_size(), len(named) * width)
    if fed != wanted:
        raise _Unfit(
            f"{WEIGHT} has shape {list(fed)}, and {len(named)} layers of this target "
            f"need {list(wanted)}. Use a drafter that was trained for this target"
        )
    # Of the depth + 1 states that transformers lists.
    layers = tuple(layer % (depth + 1) for layer in named)
    scale = float(_get(config, "pard2_scale", default=0.02))
    return TargetFeatures(layers, depth, scale, warp)


def _get(config: Any, key: str, *, default: Any) -> Any:
    for name in (key, *OLD_NAMES.get(key, ())):
        value = getattr(config, name, None)
        if value is not None:
            return value
    return default


def _layers(config: Any) -> list[int]:
    size = int(_get(config, "pard2_target_dim", default=4096))
    has_many = _get(config, "pard2_ml", default=size > 10000)
    default = MANY_LAYERS if has_many else MANY_LAYERS[:1]
    return [int(i) for i in _get(config, "pard2_target_layers", default=default)]


def warp_here(spec: "SpeculativeConfig") -> Path:
    """The projection's file on this machine.

    A model of a hub may have been resolved on another machine, whose cache is its own.
    """
    resolved = spec.drafter.target_features.warp
    return resolved if resolved.is_file() else _find_warp(spec) or resolved


def _find_warp(spec: "SpeculativeConfig") -> Path | None:
    if (folder := Path(spec.model)).exists():
        return folder / WARP if (folder / WARP).is_file() else None
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(spec.model, WARP, revision=spec.revision))
    except (OSError, ValueError):
        return None


def load_warp(file: Path) -> dict[str, torch.Tensor]:
    """The projection's tensors, on the CPU; no code in the file is run.

    Raises:
        ValueError: it holds more, or other things, than those tensors.
    """
    try:
        tensors = torch.load(file, map_location="cpu", weights_only=True)
    except (UnpicklingError, RuntimeError, EOFError, ValueError) as error:
        first = str(error).partition("\n")[0]
        raise ValueError(
            f"{file} is broken, or holds more than tensors, which is not loaded "
            f"({first}): {AGAIN}, from a source that you trust."
        ) from None
    names = sorted(tensors) if isinstance(tensors, dict) else []
    if names not in ([WEIGHT], [BIAS, WEIGHT]):
        raise ValueError(
            f"{file} must hold {WEIGHT}, and may hold {BIAS}, but holds "
            f"{names or type(tensors).__name__}: {AGAIN}."
        )
    return tensors
