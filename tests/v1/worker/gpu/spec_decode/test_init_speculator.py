# SPDX-License-Identifier: Apache-2.0
"""Which speculator a config gets, and what the log says of it and of its memory."""

import logging
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from vllm.config.drafter import DrafterConfig
from vllm.v1.worker.gpu import spec_decode
from vllm.v1.worker.gpu.spec_decode import unified
from vllm.v1.worker.gpu.spec_decode.eagle import speculator as eagle
from vllm.v1.worker.gpu.spec_decode.unified.speculator import (
    log_draft_logits,
)

CPU = torch.device("cpu")


@pytest.mark.parametrize("is_unified", [True, False])
def test_the_resolved_drafter_decides(monkeypatch, is_unified: bool):
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


def test_memory_that_is_said_is_requests_times_drafts_times_vocabulary(caplog_vllm):
    """The example of the documentation, without the memory."""
    caplog_vllm.set_level(logging.INFO, logger="vllm")
    logits = torch.empty(256, 7, 128256, dtype=torch.bfloat16, device="meta")
    log_draft_logits(logits)
    (line,) = caplog_vllm.messages
    documented = Path(__file__).parents[5] / "docs" / "sampling.md"
    assert line.split(" Lower ")[0] in documented.read_text()
    assert f"take {256 * 7 * 128256 * 2 / 2**30:.3f} GiB" in line
