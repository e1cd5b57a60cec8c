# SPDX-License-Identifier: Apache-2.0
"""A drafter is quantized as its own files say, whatever its target is."""

import json
import shutil
from pathlib import Path

import pytest

from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.models.utils import get_draft_quant_config
from vllm.platforms import current_platform

if current_platform.is_cpu():
    import vllm.v1.worker.cpu.shm  # noqa: F401  (what Runner V2 needs on a CPU)

from vllm.v1.worker.gpu.spec_decode.unified import draft_model

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


def copy_of(folder: Path, to: Path, quantized: bool) -> Path:
    """Its config alone says so: no weights are loaded."""
    shutil.copytree(folder, to)
    file = to / "config.json"
    config = json.loads(file.read_text())
    config |= {"quantization_config": QUANTIZED} if quantized else {}
    file.write_text(json.dumps(config))
    return to


@pytest.fixture
def configure(models, tmp_path):
    def run(drafter: str, *, target: bool, draft: bool) -> VllmConfig:
        """`target` and `draft`: whether they are quantized."""
        return EngineArgs(
            model=str(copy_of(models / "target", tmp_path / "target", target)),
            speculative_config={
                "model": str(copy_of(models / drafter, tmp_path / "drafter", draft))
            },
            dtype="float32",
            enforce_eager=True,
        ).create_engine_config()

    return run


def name_of(quant_config) -> str | None:
    return quant_config and quant_config.get_name()


CASES = [(True, False), (False, True), (True, True)]


@pytest.mark.parametrize("target, draft", CASES)
def test_heads(target: bool, draft: bool, configure):
    config = configure("eagle3", target=target, draft=draft)
    found = name_of(config.quant_config), name_of(get_draft_quant_config(config))
    assert found == tuple("compressed-tensors" if q else None for q in (target, draft))


@pytest.mark.parametrize("target, draft", CASES)
def test_draft_models(target: bool, draft: bool, configure, monkeypatch):
    """Proposals for PARD-2 shared the target's config, and nothing was accepted."""
    config = configure("pard", target=target, draft=draft)
    seen = []
    monkeypatch.setattr(
        draft_model, "get_model", lambda vllm_config, **_: seen.append(vllm_config)
    )
    draft_model.load_draft_model(config)
    (own,) = seen
    found = name_of(config.quant_config), name_of(own.quant_config)
    assert found == tuple("compressed-tensors" if q else None for q in (target, draft))
