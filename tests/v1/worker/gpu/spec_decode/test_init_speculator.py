# SPDX-License-Identifier: Apache-2.0
"""Which speculator is built for a config."""

from types import SimpleNamespace

import pytest
import torch

from vllm.config.drafter import DrafterConfig
from vllm.v1.worker.gpu import spec_decode
from vllm.v1.worker.gpu.spec_decode.eagle import speculator as eagle
from vllm.v1.worker.gpu.spec_decode.unified import speculator as unified

CPU = torch.device("cpu")


@pytest.mark.parametrize("is_unified", [True, False])
def test_speculator_follows_resolved_drafter(monkeypatch, is_unified: bool):
    monkeypatch.setattr(unified, "build_speculator", lambda *_: "unified")
    monkeypatch.setattr(eagle, "EagleSpeculator", lambda *_: "vLLM's")
    spec = SimpleNamespace(
        method="eagle3",
        drafter=DrafterConfig("eagle3", 3, is_unified=is_unified),
        use_gemma4_mtp=lambda: False,
        use_multi_module_mtp=lambda: False,
        use_eagle=lambda: True,
    )
    made = spec_decode.init_speculator(SimpleNamespace(speculative_config=spec), CPU, 0)
    assert made == ("unified" if is_unified else "vLLM's")
