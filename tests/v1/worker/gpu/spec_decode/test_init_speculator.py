# SPDX-License-Identifier: Apache-2.0
"""Which speculator a config gets, and what the log says of it and of its memory."""

import logging
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from vllm.config.drafter import DrafterConfig
from vllm.platforms import current_platform

if current_platform.is_cpu():
    import vllm.v1.worker.cpu.shm  # noqa: F401  (what Runner V2 needs on a CPU)

from vllm.v1.worker.gpu import spec_decode
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu.spec_decode import speculator as base
from vllm.v1.worker.gpu.spec_decode import unified
from vllm.v1.worker.gpu.spec_decode.eagle import speculator as eagle
from vllm.v1.worker.gpu.spec_decode.unified.draft_model import DraftModelDrafter
from vllm.v1.worker.gpu.spec_decode.unified.speculator import (
    UnifiedSpeculator,
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


REQUESTS, DRAFTS, VOCAB = 6, 3, 40


def drafting_config(method: str) -> SimpleNamespace:
    """What a speculator reads of a config before anything is loaded."""
    draft = SimpleNamespace(get_hidden_size=lambda: 8, get_vocab_size=lambda: VOCAB)
    spec = SimpleNamespace(
        method="draft_model",
        num_speculative_tokens=DRAFTS,
        drafter=DrafterConfig("draft_model", DRAFTS),
        draft_model_config=draft,
        draft_sample_method=method,
        rejection_sample_method="standard",
        use_local_argmax_reduction=False,
        enable_adaptive_verification=False,
        enforce_eager=False,
        uses_draft_model=lambda: True,
        uses_dynamic_speculative_decoding=lambda: False,
    )
    model = SimpleNamespace(
        max_model_len=64,
        dtype=torch.bfloat16,
        head_dtype=torch.bfloat16,
        use_fp64_gumbel=False,
    )
    return SimpleNamespace(
        speculative_config=spec,
        scheduler_config=SimpleNamespace(
            max_num_seqs=REQUESTS, max_num_batched_tokens=32
        ),
        parallel_config=SimpleNamespace(
            data_parallel_size=1, data_parallel_rank=0, decode_context_parallel_size=1
        ),
        compilation_config=SimpleNamespace(compile_ranges_endpoints=None),
        model_config=model,
    )


def speculator(method: str) -> UnifiedSpeculator:
    config = drafting_config(method)
    return UnifiedSpeculator(config, CPU, DraftModelDrafter(config, CPU))


def test_draft_probabilities_are_allocated_and_said_at_once(monkeypatch, caplog_vllm):
    """By the constructor: what is allocated then comes off the memory for KV blocks."""
    monkeypatch.setattr(base, "_target_feeds_hc_residual", lambda _: False)
    caplog_vllm.set_level(logging.INFO, logger="vllm")
    logits = speculator("probabilistic").draft_logits
    assert logits.shape == (REQUESTS, DRAFTS, VOCAB)
    (line,) = (text for text in caplog_vllm.messages if "probabilities take" in text)
    num_bytes = REQUESTS * DRAFTS * VOCAB * 2  # of a bfloat16
    assert logits.untyped_storage().nbytes() == num_bytes
    shape = f"{REQUESTS} requests x {DRAFTS} drafts x {VOCAB} tokens, torch.bfloat16"
    assert shape in line


def test_memory_that_is_said_is_requests_times_drafts_times_vocabulary(caplog_vllm):
    """The example of the documentation, without the memory."""
    caplog_vllm.set_level(logging.INFO, logger="vllm")
    logits = torch.empty(256, 7, 128256, dtype=torch.bfloat16, device="meta")
    log_draft_logits(logits)
    (line,) = caplog_vllm.messages
    documented = Path(__file__).parents[5] / "docs" / "sampling.md"
    assert line.split(" Lower ")[0] in documented.read_text()
    assert f"take {256 * 7 * 128256 * 2 / 2**30:.3f} GiB" in line


def test_greedy_drafts_keep_none(monkeypatch, caplog_vllm):
    monkeypatch.setattr(base, "_target_feeds_hc_residual", lambda _: False)
    caplog_vllm.set_level(logging.INFO, logger="vllm")
    assert speculator("greedy").draft_logits is None
    assert not any("probabilities take" in text for text in caplog_vllm.messages)


def test_speculators_are_made_with_the_runner():
    """Before weights are loaded, and so before memory is measured."""
    assert "init_speculator" in GPUModelRunner.__init__.__code__.co_names
