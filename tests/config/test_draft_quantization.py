# SPDX-License-Identifier: Apache-2.0
"""A drafter's quantization comes from its own files, not from its target's."""

import shutil
from unittest.mock import Mock

import pytest

from vllm.config import VllmConfig
from vllm.model_executor.models.utils import get_draft_quant_config
from vllm.platforms import current_platform

if current_platform.is_cpu():
    import vllm.v1.worker.cpu.shm  # noqa: F401  (what Runner V2 needs on a CPU)

from vllm.v1.worker.gpu.spec_decode.unified import draft_model

from .bad_row import config
from .specs import engine_config

INT8 = {"num_bits": 8, "type": "int", "symmetric": True}
QUANTIZED = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": INT8 | {"strategy": "channel", "dynamic": False},
            "input_activations": INT8 | {"strategy": "token", "dynamic": True},
        }
    },
    "ignore": ["lm_head"],
}


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
