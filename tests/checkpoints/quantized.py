# SPDX-License-Identifier: Apache-2.0
"""Checkpoints with quantized linear layers, in the file layout of each format."""

import json
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.checkpoints.tensors import Tensors

BITS, GROUP = 4, 32  # rows of a column that share a scale
ZERO = 1 << BITS - 1
# Order in which AWQ packs eight numbers into 32 bits.
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
# The tensors of a weight in a checkpoint, and the weight that they stand for.
Quantized = tuple[Tensors, torch.Tensor]


def pack(numbers: torch.Tensor, dim: int) -> torch.Tensor:
    """int32, each with eight four-bit numbers from dimension `dim`."""
    rows = numbers.movedim(dim, -1).unflatten(-1, (-1, 32 // BITS))
    packed = (rows.long() << torch.arange(0, 32, BITS)).sum(-1)
    return packed.to(torch.uint32).view(torch.int32).movedim(-1, dim).contiguous()


def in_groups(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[in, out] numbers from 0 to 15, [in / GROUP, out] scales, and the whole that they
    stand for: [out, in], as the weight."""
    groups = weight.T.unflatten(0, (-1, GROUP))
    scales = (groups.abs().amax(1) / (ZERO - 1)).half()
    numbers = (groups / scales[:, None]).round()
    whole = (numbers * scales[:, None]).flatten(0, 1).T
    return (numbers + ZERO).flatten(0, 1), scales, whole


def gptq(weight: torch.Tensor) -> Quantized:
    numbers, scales, whole = in_groups(weight)
    zeros = torch.full_like(scales, ZERO - 1)  # GPTQ stores zero points minus one
    return {
        "qweight": pack(numbers, 0),
        "qzeros": pack(zeros, 1),
        "scales": scales,
        "g_idx": (torch.arange(len(numbers)) // GROUP).int(),
    }, whole


def awq(weight: torch.Tensor) -> Quantized:
    numbers, scales, whole = in_groups(weight)
    zeros = torch.full_like(scales, ZERO)
    packed = {
        name: pack(part.unflatten(1, (-1, 8))[:, :, AWQ_ORDER].flatten(1), 1)
        for name, part in (("qweight", numbers), ("qzeros", zeros))
    }
    return packed | {"scales": scales}, whole


def int8(weight: torch.Tensor) -> Quantized:
    scale = weight.abs().amax(1, keepdim=True) / 127
    numbers = (weight / scale).round().char()
    return {"weight": numbers, "weight_scale": scale}, numbers * scale


def fp8(weight: torch.Tensor) -> Quantized:
    scale = weight.abs().amax(1, keepdim=True) / 448
    numbers = (weight / scale).to(torch.float8_e4m3fn)
    return {"weight": numbers, "weight_scale": scale}, numbers.float() * scale


def modelopt(weight: torch.Tensor) -> Quantized:
    made, whole = fp8(weight)
    return made | {"weight_scale": made["weight_scale"][:, 0].contiguous()}, whole


def compressed_tensors(file_format: str, **number: Any) -> dict[str, Any]:
    number |= {"num_bits": 8, "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": number | {"strategy": "channel"},
        "input_activations": number | {"strategy": "token", "dynamic": True},
    }
    return {
        "quant_method": "compressed-tensors",
        "format": file_format,
        "config_groups": {"group_0": group},
    }


IN_GROUPS = {"bits": BITS, "group_size": GROUP}
# By format: the function that quantizes a weight, the quantization config, and its key
# for the names of layers that are not quantized; GPTQ has none.
FORMATS: dict[str, tuple[Callable[[torch.Tensor], Quantized], dict[str, Any], str]] = {
    "GPTQ": (
        gptq,
        {"quant_method": "gptq", "desc_act": False, "sym": True} | IN_GROUPS,
        "",
    ),
    "AWQ": (
        awq,
        {"quant_method": "awq", "zero_point": True, "version": "gemm"} | IN_GROUPS,
        "modules_to_not_convert",
    ),
    "int8 W8A8": (int8, compressed_tensors("int-quantized", type="int"), "ignore"),
}
# Formats that not every machine's kernels can run.
MORE_FORMATS = FORMATS | {
    "fp8 W8A8": (fp8, compressed_tensors("float-quantized", type="float"), "ignore"),
    "ModelOpt fp8": (
        modelopt,
        {"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"},
        "ignore",
    ),
}


def quantize(
    folder: Path,
    name: str,
    skipped: Collection[str] = (),  # ends of names of layers that are not quantized
    ignored: Collection[str] | None = None,  # how the config names these, if otherwise
) -> Tensors:
    """Quantizes the layers of a model in place.

    Returns the weights that the quantized ones stand for, and all other tensors.
    """
    quantized, described, key = MORE_FORMATS[name]
    file, plain = folder / "model.safetensors", ["lm_head"]
    tensors, whole = {}, {}
    for path, tensor in load_file(file).items():
        layer, _, kind = path.rpartition(".")
        tensors[path] = whole[path] = tensor
        if not layer.endswith(("proj", "fc")) or kind != "weight":
            continue
        if layer.endswith(tuple(skipped)) and skipped:
            plain.append(layer)
            continue
        del tensors[path]
        made, whole[path] = quantized(tensor.float())
        tensors |= {f"{layer}.{part}": t.contiguous() for part, t in made.items()}
    save_file(tensors, file, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    listed = {key: plain if ignored is None else list(ignored)} if key else {}
    config["quantization_config"] = described | listed
    (folder / "config.json").write_text(json.dumps(config))
    return whole
