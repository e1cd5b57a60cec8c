# SPDX-License-Identifier: Apache-2.0
"""Checkpoints with quantized linear layers, in the file layout of each format."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.checkpoints.tensors import Tensors

BITS, GROUP = 4, 32  # rows of a column that share a scale
ZERO = 1 << BITS - 1
# Order in which AWQ packs eight numbers into 32 bits.
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


def pack(numbers: torch.Tensor, dim: int) -> torch.Tensor:
    """int32, each with eight four-bit numbers from dimension `dim`."""
    rows = numbers.movedim(dim, -1).unflatten(-1, (-1, 32 // BITS))
    packed = (rows.long() << torch.arange(0, 32, BITS)).sum(-1)
    return packed.to(torch.uint32).view(torch.int32).movedim(-1, dim).contiguous()


def in_groups(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[in, out] numbers from 0 to 15, and [in / GROUP, out] scales.

    Args:
        weight: [out, in].
    """
    groups = weight.T.unflatten(0, (-1, GROUP))
    scales = groups.abs().amax(1) / (ZERO - 1)
    numbers = (groups / scales[:, None]).round() + ZERO
    return numbers.flatten(0, 1), scales


def gptq(weight: torch.Tensor) -> Tensors:
    numbers, scales = in_groups(weight)
    zeros = torch.full_like(scales, ZERO - 1)  # GPTQ stores zero points minus one
    return {
        "qweight": pack(numbers, 0),
        "qzeros": pack(zeros, 1),
        "scales": scales.half(),
        "g_idx": (torch.arange(len(numbers)) // GROUP).int(),
    }


def awq(weight: torch.Tensor) -> Tensors:
    numbers, scales = in_groups(weight)
    zeros = torch.full_like(scales, ZERO)
    packed = {
        name: pack(part.unflatten(1, (-1, 8))[:, :, AWQ_ORDER].flatten(1), 1)
        for name, part in (("qweight", numbers), ("qzeros", zeros))
    }
    return packed | {"scales": scales.half()}


def int8(weight: torch.Tensor) -> Tensors:
    scales = weight.abs().amax(1, keepdim=True) / 127
    return {"weight": (weight / scales).round().char(), "weight_scale": scales}


INT8 = {"num_bits": 8, "type": "int", "symmetric": True}
# By format: the function that quantizes a weight, and the quantization config.
FORMATS: dict[str, tuple[Callable[[torch.Tensor], Tensors], dict[str, Any]]] = {
    "GPTQ": (
        gptq,
        {"quant_method": "gptq", "bits": BITS, "group_size": GROUP}
        | {"desc_act": False, "sym": True},
    ),
    "AWQ": (
        awq,
        {"quant_method": "awq", "bits": BITS, "group_size": GROUP}
        | {"zero_point": True, "version": "gemm"},
    ),
    "int8 W8A8": (
        int8,
        {
            "quant_method": "compressed-tensors",
            "format": "int-quantized",
            "ignore": ["lm_head"],
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": INT8 | {"strategy": "channel"},
                    "input_activations": INT8 | {"strategy": "token", "dynamic": True},
                }
            },
        },
    ),
}


def quantize(folder: Path, name: str) -> None:
    """Quantizes the layers of a model in place."""
    quantized, described = FORMATS[name]
    file = folder / "model.safetensors"
    tensors: Tensors = {}
    for path, tensor in load_file(file).items():
        if path.endswith("proj.weight"):
            layer = path.removesuffix("weight")
            tensors |= {layer + part: t for part, t in quantized(tensor).items()}
        else:
            tensors[path] = tensor
    save_file(tensors, file, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = described
    (folder / "config.json").write_text(json.dumps(config))
