# SPDX-License-Identifier: Apache-2.0
"""Drafts use the current weights after weight updates and after sleep.

`test_targets.py` tests every kind of drafter with a target that is updated.
"""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from .conftest import RunEngine
from .target_models import (
    save_head,
    save_pard,
    save_pard2,
    save_sharing_head,
    save_target,
)
from .test_targets import (
    ACCEPTED,
    ENGINE,
    LENGTHS,
    NUM_TOKENS,
    K,
    acceptance,
    greedy_output,
    prompt,
)

pytestmark = pytest.mark.slow


def asked(step: int = 1) -> list[dict[str, Any]]:
    return [{"prompt": prompt(n, step), "max_tokens": NUM_TOKENS} for n in LENGTHS]


def expected_output(step: int = 1) -> list[list[int]]:
    return [greedy_output(length, step) for length in LENGTHS]


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    return save_target("Llama", tmp_path_factory.mktemp("targets") / "one")


SENT = {
    "weight_transfer_config": {"backend": "files"},
    "worker_extension_cls": "weight_files.Worker",
}


@pytest.mark.parametrize(
    "lm_head, how", [(None, "target"), ("fp8", "target"), ("fp8", "sent_target")]
)
def test_shared_embeddings_and_lm_head(
    lm_head, how: str, run_engine: RunEngine, target: Path, tmp_path: Path
):
    """A head shares the target's embeddings and lm_head, which are updated."""
    head = save_sharing_head(tmp_path / "head")
    other = save_target("Llama", tmp_path / "two", seed=1, step=2)
    result = run_engine(
        {"before": asked(step=1), "after": asked(step=2)},
        model=target,
        speculative_config={
            "model": str(head),
            "num_speculative_tokens": K,
            "draft_lm_head_quantization": lm_head,
        },
        updates={"after": {how: str(other)}},
        **(SENT if how == "sent_target" else {}),
        **ENGINE | {"dtype": "bfloat16" if lm_head else "float32"},
    )
    for step, found in enumerate(result["scenarios"].values(), 1):
        assert found["tokens"] == expected_output(step)
        assert min(acceptance(found)) >= ACCEPTED


@pytest.mark.parametrize(
    "drafts, width, lm_head", [(K, K, None), (6, 3, None), (K, K, "fp8")]
)
def test_updated_drafter(
    drafts: int,
    width: int,
    lm_head,
    run_engine: RunEngine,
    target: Path,
    tmp_path: Path,
):
    """Updates a P-EAGLE head, with the hidden state that masks are fed in each pass."""
    head = save_head(tmp_path / "head", is_parallel=True)
    wrong = save_head(tmp_path / "wrong", is_parallel=True)
    change(wrong / "model.safetensors")
    result = run_engine(
        {"before": asked(), "after": asked()},
        model=target,
        speculative_config={
            "model": str(wrong),
            "num_speculative_tokens": drafts,
            "parallel_drafting_width": width,
            "draft_lm_head_quantization": lm_head,
        },
        updates={"after": {"sent_drafter": str(head)}},
        **SENT,
        **ENGINE | {"dtype": "bfloat16" if lm_head else "float32"},
    )
    before, after = result["scenarios"].values()
    assert before["tokens"] == after["tokens"] == expected_output()
    assert min(acceptance(before, drafts)) < 0.5
    assert min(acceptance(after, drafts)) >= ACCEPTED


SAVE = {
    "pard": save_pard,
    "pard2": save_pard2,
    "eagle3": partial(save_head, is_parallel=False),
    "peagle": partial(save_head, is_parallel=True),
    "sharing head": save_sharing_head,
}


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("drafter", SAVE)
def test_sleep(
    drafter: str,
    level: int,
    run_engine: RunEngine,
    target: Path,
    tmp_path: Path,
    on_cpu: bool,
):
    """Buffers and graphs of the drafter work after waking up."""
    if on_cpu:
        pytest.skip("needs a GPU: on a CPU vLLM does not sleep")
    folder = SAVE[drafter](tmp_path / "drafter")
    result = run_engine(
        {"before": asked(), "after": asked()},
        model=target,
        speculative_config={"model": str(folder), "num_speculative_tokens": K},
        dtype="float32",
        enable_sleep_mode=True,
        sleep_preserve_parameter_names=["draft.*"],
        record_graphs=True,
        sleeps={"after": level},
        **ENGINE,
    )
    for found in result["scenarios"].values():
        assert found["tokens"] == expected_output()
        assert min(acceptance(found)) >= ACCEPTED


@pytest.mark.parametrize("drafter", SAVE)
def test_learned_estimates_outlast_sleep(
    drafter: str, run_engine: RunEngine, target: Path, tmp_path: Path, on_cpu: bool
):
    """Nothing that the speculator keeps is discarded but the weights and the KV cache.

    On a CPU vLLM does not sleep; what it would discard is known there, too.
    """
    folder = SAVE[drafter](tmp_path / "drafter")
    spec = {"model": str(folder), "num_speculative_tokens": K}
    asks = 3 * asked()  # enough to verify only part of the drafts
    asleep = {
        "enable_sleep_mode": True,
        "sleep_preserve_parameter_names": ["draft.*"],
        "sleeps": {"again": 1, "after": 2},
    }
    result = run_engine(
        {"before": asks, "again": asks, "after": asks},
        model=target,
        speculative_config=spec | {"enable_adaptive_verification": True},
        record_graphs=True,
        made_up_times=True,
        watch_loading=True,
        **({} if on_cpu else asleep),
        **ENGINE | {"max_num_seqs": len(asks), "max_num_batched_tokens": 96},
    )
    assert result["discarded"] == result["forgotten"] == []
    for found in result["scenarios"].values():
        assert found["tokens"] == 3 * expected_output()
        counted = found["counters"]
        assert 0 < counted["num_draft_tokens"][0] < K * counted["num_drafts"][0]


def change(file: Path) -> None:
    """Changes a head so that masks act like states of tokens, and logits are rotated by
    one token."""
    tensors = load_file(file)
    tensors["lm_head.weight"] = torch.roll(tensors["lm_head.weight"], 1, 0)
    tensors["mask_hidden"] = torch.roll(tensors["mask_hidden"], 1, -1) * 50
    save_file(tensors, file)
