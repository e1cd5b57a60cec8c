# SPDX-License-Identifier: Apache-2.0
"""Drafts use the current weights after weight updates and after sleep.

`test_targets.py` tests every kind of drafter with a target that is updated.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from .hooks import sleep, update_weights
from .made_up_times import make_up_times
from .runner import Engine, Request
from .target_models import (
    NUM_TOKENS,
    SAVE,
    K,
    greedy_output,
    prompt,
    save_head,
    save_sharing_head,
    save_target,
)
from .test_targets import ACCEPTED, ENGINE, LENGTHS, acceptance

pytestmark = pytest.mark.slow


def requests(step: int = 1) -> list[Request]:
    return [Request(prompt(length, step), NUM_TOKENS) for length in LENGTHS]


def expected_output(step: int = 1) -> list[list[int]]:
    return [greedy_output(length, step) for length in LENGTHS]


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    return save_target("Llama", tmp_path_factory.mktemp("targets") / "one")


@dataclass
class Folder(WeightTransferUpdateInfo):
    folder: str


class WeightFiles(WeightTransferEngine[WeightTransferInitInfo, Folder]):
    """A weight transfer backend of vLLM that loads the tensors of a checkpoint."""

    init_info_cls, update_info_cls = WeightTransferInitInfo, Folder

    def init_transfer_engine(self, init_info: WeightTransferInitInfo) -> None:
        """No connection is needed."""

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Unlike vLLM's method this also works on a CPU, without synchronizing."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: Folder) -> None:
        files = Path(update_info.folder).glob("*.safetensors")
        self.model.load_weights(
            pair for file in files for pair in load_file(file).items()
        )

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """No resources to release."""


def register() -> None:
    """Setup: the backend "files"."""
    WeightTransferEngineFactory.register_engine("files", WeightFiles)


SENT = {"weight_transfer_config": {"backend": "files"}, "setup": [register]}


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


def estimates(engine: Engine) -> dict[str, torch.Tensor]:
    """Copies of the acceptance estimator's tensors, after it has learned something."""
    estimator = engine.speculator.acceptance_estimator
    assert estimator._refits > 0
    parts = vars(estimator).items()
    return {name: each.cpu() for name, each in parts if torch.is_tensor(each)}


@pytest.mark.parametrize("drafter", ["pard", "pard2", "peagle", "sharing head"])
def test_sleep(drafter: str, vllm_runner, target: Path, tmp_path: Path, on_cpu: bool):
    """Buffers, graphs and learned estimates of the drafter outlast sleep."""
    if on_cpu:
        pytest.skip("needs a GPU: on a CPU vLLM does not sleep")
    asked = 3 * requests()  # enough to verify only part of the drafts
    save = SAVE.get(drafter, save_sharing_head)
    spec = {"model": str(save(tmp_path / "drafter"))}
    spec |= {"num_speculative_tokens": K, "enable_adaptive_verification": True}
    with vllm_runner(
        target,
        graphs=True,
        setup=[make_up_times],
        speculative_config=spec,
        enable_sleep_mode=True,
        sleep_preserve_parameter_names=["draft.*"],
        **ENGINE | {"max_num_seqs": len(asked), "max_num_batched_tokens": 96},
    ) as llm:
        for level in (0, 1, 2):
            if level:
                learned = llm.call(estimates)
                assert learned
                llm.call(sleep, level, str(target))
                for name, found in llm.call(estimates).items():
                    assert torch.equal(found, learned[name]), name
            few, many = llm.generate(requests()), llm.generate(asked)
            assert few.tokens == expected_output()
            assert many.tokens == 3 * expected_output()
            assert min(acceptance(few)) >= ACCEPTED
            drafts, verified = map(many.count, ("num_drafts", "num_draft_tokens"))
            assert 0 < verified < K * drafts


def change(file: Path) -> None:
    """Changes a head so that masks act like states of tokens, and logits are rotated by
    one token."""
    tensors = load_file(file)
    tensors["lm_head.weight"] = torch.roll(tensors["lm_head.weight"], 1, 0)
    tensors["mask_hidden"] = torch.roll(tensors["mask_hidden"], 1, -1) * 50
    save_file(tensors, file)
