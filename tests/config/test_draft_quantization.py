# SPDX-License-Identifier: Apache-2.0
"""A drafter's quantization comes from its own files, not from its target's."""

import shutil
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch.nn as nn

from vllm.config import VllmConfig, set_current_vllm_config
from vllm.config.drafter.weights import check_scales
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.models.utils import get_draft_quant_config
from vllm.platforms import current_platform

if current_platform.is_cpu():
    import vllm.v1.worker.cpu.shm  # noqa: F401  (what Runner V2 needs on a CPU)

from tests.checkpoints.quantized import compressed_tensors, quantize
from vllm.v1.worker.gpu.spec_decode.unified.drafters import draft_model

from .bad_row import config
from .specs import engine_config

QUANTIZED = compressed_tensors("int-quantized", type="int") | {"ignore": ["lm_head"]}


@pytest.fixture
def configure(models, tmp_path):
    def run(drafter: str, *, target: bool, draft: bool) -> VllmConfig:
        """`target` and `draft`: whether their configs say that they are quantized."""
        folders = tmp_path / "target", tmp_path / "drafter"
        for name, folder, is_quantized in zip(
            ("target", drafter), folders, (target, draft), strict=True
        ):
            shutil.copytree(models / name, folder)
            if is_quantized:
                config(quantization_config=QUANTIZED)(folder)
        return engine_config(folders[0], {"model": str(folders[1])})

    return run


@pytest.mark.parametrize("target, draft", [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("drafter", ["eagle3", "pard"])
def test_quantization_from_own_files(
    drafter: str, target: bool, draft: bool, configure, monkeypatch
):
    """Proposals for PARD-2 used the target's quantization: no draft was accepted."""
    config = configure(drafter, target=target, draft=draft)
    if drafter == "eagle3":
        own = get_draft_quant_config(config)
    else:
        get_model = Mock()
        monkeypatch.setattr(draft_model, "get_model", get_model)
        draft_model.load_draft_model(config)
        own = get_model.call_args.kwargs["vllm_config"].quant_config
    found = [each and each.get_name() for each in (config.quant_config, own)]
    assert found == ["compressed-tensors" if q else None for q in (target, draft)]


# The first layer in vLLM, which numbers a head's after the target's.
FIRST = dict.fromkeys(("draft", "pard"), "draft_model.model.layers.0.")
FIRST |= dict.fromkeys(("eagle3", "peagle"), "model.layers.6.")
QKV = tuple(f"layers.0.self_attn.{part}_proj" for part in "qkv")


class Linear(LinearBase):
    def __init__(self) -> None:
        nn.Module.__init__(self)


@pytest.fixture
def methods(models):
    """The quantization methods that a drafter's layers get, by vLLM's names."""

    def get(folder: Path, *names: str) -> list[str]:
        spec = {"model": str(folder)}
        config = engine_config(models / "target", spec, dtype="bfloat16")
        with set_current_vllm_config(config):
            quantization = get_draft_quant_config(config)
            found = [quantization.get_quant_method(Linear(), name) for name in names]
        return [type(method).__name__ for method in found]

    return get


@pytest.mark.parametrize("name", ["int8 W8A8", "ModelOpt fp8", "GPTQ", "AWQ"])
@pytest.mark.parametrize("drafter", FIRST)
def test_layers_are_built_as_the_file_has_them(
    drafter: str, name: str, models, methods, tmp_path
):
    """Layers were quantized that the file ignores by name, since vLLM names others."""
    shutil.copytree(models / drafter, folder := tmp_path / "drafter")
    quantize(folder, name, (*QKV, "fc", "layers.0.mlp.down_proj"))
    at = FIRST[drafter]
    plain = [f"{at}self_attn.qkv_proj", f"{at}mlp.down_proj"]
    if drafter in ("eagle3", "peagle"):
        plain.append("model.fc")
    quantized = [f"{at}self_attn.o_proj", f"{at}mlp.gate_up_proj"]
    found = methods(folder, *plain, *quantized)
    assert set(found[: len(plain)]) == {"UnquantizedLinearMethod"}
    assert "UnquantizedLinearMethod" not in found[len(plain) :]


@pytest.mark.parametrize("drafter", FIRST)
def test_partly_quantized_layer_is_refused(drafter: str, models, methods, tmp_path):
    shutil.copytree(models / drafter, folder := tmp_path / "drafter")
    quantize(folder, "int8 W8A8", QKV[:1])
    said = r"k_proj, .*v_proj quantized, but not .*q_proj, and vLLM merges them"
    with pytest.raises(ValueError, match=said):
        methods(folder, f"{FIRST[drafter]}self_attn.qkv_proj")


def test_scales_of_mistral_are_known():
    """Its own format names them `qscale_weight`."""
    draft = SimpleNamespace(
        model="a/drafter",
        quantization="fp8",
        model_arch_config=SimpleNamespace(quantization_config={"quant_method": "fp8"}),
    )
    layer = "layers.0.attention.wq"
    named = {f"{layer}.weight": "F8_E4M3", f"{layer}.qscale_weight": "F32"}
    found = {name: SimpleNamespace(dtype=dtype) for name, dtype in named.items()}
    check_scales(draft, found)
    del found[f"{layer}.qscale_weight"]
    with pytest.raises(ValueError, match="quantized weights, but no scale"):
        check_scales(draft, found)
