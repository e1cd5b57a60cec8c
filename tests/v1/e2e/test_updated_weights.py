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

from .hooks import sleep, update_weights
from .made_up_times import make_up_times
from .runner import Engine, Request, VllmRunner
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


def requests(step: int = 1) -> list[Request]:
    return [Request(prompt(length, step), NUM_TOKENS) for length in LENGTHS]


def expected_output(step: int = 1) -> list[list[int]]:
    return [greedy_output(length, step) for length in LENGTHS]


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    return save_target("Llama", tmp_path_factory.mktemp("targets") / "one")


SENT = {
    "weight_transfer_config": {"backend": "files"},
    "worker_extension_cls": "tests.v1.e2e.weight_files.Worker",
}


@pytest.mark.parametrize(
    "lm_head, how", [(None, "target"), ("fp8", "target"), ("fp8", "sent_target")]
)
def test_shared_embeddings_and_lm_head(
    lm_head, how: str, vllm_runner, target: Path, tmp_path: Path
):
    """A head shares the target's embeddings and lm_head, which are updated."""
    head = save_sharing_head(tmp_path / "head")
    other = save_target("Llama", tmp_path / "two", seed=1, step=2)
    spec = {
        "model": str(head),
        "num_speculative_tokens": K,
        "draft_lm_head_quantization": lm_head,
    }
    sent = SENT if how == "sent_target" else {}
    dtype = {"dtype": "bfloat16" if lm_head else "float32"}
    with vllm_runner(target, speculative_config=spec, **sent, **ENGINE | dtype) as llm:
        for step in (1, 2):
            if step == 2:
                llm.call(update_weights, **{how: str(other)})
            served = llm.generate(requests(step))
            assert served.tokens == expected_output(step)
            assert min(acceptance(served)) >= ACCEPTED


@pytest.mark.parametrize(
    "drafts, width, lm_head", [(K, K, None), (5, 3, None), (K, K, "fp8")]
)
def test_updated_drafter(
    drafts: int, width: int, lm_head, vllm_runner, target: Path, tmp_path: Path
):
    """Updates a P-EAGLE head, with the hidden state that masks are fed in each pass."""
    head = save_head(tmp_path / "head", is_parallel=True)
    wrong = save_head(tmp_path / "wrong", is_parallel=True)
    change(wrong / "model.safetensors")
    spec = {
        "model": str(wrong),
        "num_speculative_tokens": drafts,
        "parallel_drafting_width": width,
        "draft_lm_head_quantization": lm_head,
    }
    dtype = {"dtype": "bfloat16" if lm_head else "float32"}
    with vllm_runner(target, speculative_config=spec, **SENT, **ENGINE | dtype) as llm:
        before = llm.generate(requests())
        llm.call(update_weights, sent_drafter=str(head))
        after = llm.generate(requests())
    assert before.tokens == after.tokens == expected_output()
    assert min(acceptance(before, drafts)) < 0.5
    assert min(acceptance(after, drafts)) >= ACCEPTED


SAVE = {
    "pard": save_pard,
    "pard2": save_pard2,
    "eagle3": partial(save_head, is_parallel=False),
    "peagle": partial(save_head, is_parallel=True),
    "sharing head": save_sharing_head,
}


@pytest.fixture
def start_sleeper(vllm_runner, target: Path, tmp_path: Path, on_cpu: bool):
    if on_cpu:
        pytest.skip("needs a GPU: on a CPU vLLM does not sleep")

    def start(drafter: str, spec: dict[str, Any], **given: Any) -> VllmRunner:
        folder = SAVE[drafter](tmp_path / "drafter")
        spec = {"model": str(folder), "num_speculative_tokens": K} | spec
        return vllm_runner(
            target,
            graphs=True,
            speculative_config=spec,
            enable_sleep_mode=True,
            sleep_preserve_parameter_names=["draft.*"],
            **ENGINE | given,
        )

    return start


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("drafter", SAVE)
def test_sleep(drafter: str, level: int, start_sleeper, target: Path):
    """Buffers and graphs of the drafter work after waking up."""
    with start_sleeper(drafter, {}) as llm:
        for is_awoken in (False, True):
            if is_awoken:
                llm.call(sleep, level, str(target))
            served = llm.generate(requests())
            assert served.tokens == expected_output()
            assert min(acceptance(served)) >= ACCEPTED


def estimates(engine: Engine) -> dict[str, torch.Tensor]:
    """Copies of the acceptance estimator's tensors, after it has learned something."""
    estimator = engine.speculator.acceptance_estimator
    assert estimator._refits > 0
    parts = vars(estimator).items()
    return {name: each.cpu() for name, each in parts if torch.is_tensor(each)}


@pytest.mark.parametrize("drafter", SAVE)
def test_learned_estimates_outlast_sleep(drafter: str, start_sleeper, target: Path):
    asked = 3 * requests()  # enough to verify only part of the drafts
    sizes = {"max_num_seqs": len(asked), "max_num_batched_tokens": 96}
    spec = {"enable_adaptive_verification": True}
    with start_sleeper(drafter, spec, setup=[make_up_times], **sizes) as llm:
        for level in (0, 1, 2):
            if level:
                learned = llm.call(estimates)
                assert learned
                llm.call(sleep, level, str(target))
                for name, found in llm.call(estimates).items():
                    assert torch.equal(found, learned[name]), name
            served = llm.generate(asked)
            assert served.tokens == 3 * expected_output()
            drafts, verified = map(served.count, ("num_drafts", "num_draft_tokens"))
            assert 0 < verified < K * drafts


def change(file: Path) -> None:
    """Changes a head so that masks act like states of tokens, and logits are rotated by
    one token."""
    tensors = load_file(file)
    tensors["lm_head.weight"] = torch.roll(tensors["lm_head.weight"], 1, 0)
    tensors["mask_hidden"] = torch.roll(tensors["mask_hidden"], 1, -1) * 50
    save_file(tensors, file)
