# SPDX-License-Identifier: Apache-2.0
"""Models that a CPU's kernels cannot run are refused before weights load."""

from types import SimpleNamespace

import pytest
import torch

from tools.overlay.base import load_config
from vllm.platforms import current_platform
from vllm.platforms.cpu_kernels import check_kernels

pytestmark = pytest.mark.skipif(not current_platform.is_cpu(), reason="for CPUs")


def engine(target=None, draft=None) -> SimpleNamespace:
    spec = draft and SimpleNamespace(draft_model_config=draft)
    return SimpleNamespace(model_config=target, speculative_config=spec)


def model(quantization: str | None, is_moe: bool) -> SimpleNamespace:
    return SimpleNamespace(model="a/model", quantization=quantization, is_moe=is_moe)


@pytest.fixture(params=[True, False])
def knows_activation(request, monkeypatch) -> bool:
    names = ["out", "w1", *(["act_method"] * request.param)]
    schema = SimpleNamespace(arguments=[SimpleNamespace(name=n) for n in names])
    op = SimpleNamespace(default=SimpleNamespace(_schema=schema))
    monkeypatch.setattr(torch.ops._C, "fused_experts_cpu", op, raising=False)
    return request.param


@pytest.mark.parametrize("is_draft", [False, True])
@pytest.mark.parametrize("quantization", [None, "mxfp4"])
@pytest.mark.parametrize("is_moe", [False, True])
def test_quantized_experts(knows_activation, is_draft, quantization, is_moe):
    config, dense = model(quantization, is_moe), model(None, False)
    models = (dense, config) if is_draft else (config, None)
    if quantization and is_moe and not knows_activation:
        message = r"a/model is a quantized mixture.*\(mxfp4\).*unquantized, or on a GPU"
        with pytest.raises(ValueError, match=message):
            check_kernels(engine(*models))
    else:
        check_kernels(engine(*models))


def test_only_what_is_refused_is_outdated():
    outdated = load_config()["cpu"].get("kernels", {}).get("outdated", [])
    assert set(outdated) <= {"fused_experts_cpu"}
