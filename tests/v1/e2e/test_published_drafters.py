# SPDX-License-Identifier: Apache-2.0
"""Every family of published drafters, configured by nothing but its folder.

Drafts must equal those of plain PyTorch, token for token.
"""

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from tests.checkpoints.families import (
    PUBLISHED,
    write_drafter,
    write_target,
)

from .hooks import drafter_name
from .oracle import (
    assert_output_matches,
    compare_drafts,
    load_model,
    oracle_for,
)
from .runner import EngineError, Request, Served
from .test_unified_speculator import only_fast
from .watches import Drafts

# One of each kind; `tests/config` reads the files of all families.
FAST = ("pard2-qwen3", "peagle-nemo", "speculators-peagle-qwen3", "eagle3-yuhuili")
SERVED_ALONE = "speculators-eagle3"
WINDOWED = "gpt-oss"  # has two KV cache groups; is also its own draft model
PROMPTS = [list(range(100, 105)), list(range(200, 223))]
GREEDY = [Request(prompt, 16) for prompt in PROMPTS]
SEEDED = [Request(PROMPTS[0], 6, temperature=1.0, seed=3)]
FREE = [Request(PROMPTS[0], 6, temperature=1.0)]
SIZES = {"max_model_len": 96, "max_num_seqs": 4, "max_num_batched_tokens": 64}


class Targets:
    """The targets' folders and models, created on demand."""

    def __init__(self, folder: Path, tokenizer: Path) -> None:
        self.folder = cache(lambda name: write_target(name, folder / name, tokenizer))
        self.model = cache(lambda name: load_model(self.folder(name)))


@pytest.fixture(scope="module")
def targets(models: Path, tmp_path_factory) -> Targets:
    return Targets(tmp_path_factory.mktemp("targets"), models / "target")


def skip_without_experts(target: str, on_cpu: bool) -> None:
    """Skips on a GPU if `_moe_C`, which runs mixtures of experts, is not installed."""
    import vllm._custom_ops  # noqa: F401  (loads the available extensions)

    is_windowed = target.startswith(WINDOWED)
    if is_windowed and not on_cpu and not hasattr(torch.ops._moe_C, "topk_softmax"):
        pytest.skip("gpt-oss runs on _moe_C.topk_softmax, which is not installed")


@pytest.mark.parametrize("name", only_fast(PUBLISHED, *FAST))
def test_drafts_match_pytorch(name, targets, vllm_runner, on_cpu, tmp_path):
    made = PUBLISHED[name]
    skip_without_experts(made.target, on_cpu)
    folder = write_drafter(name, tmp_path / name, targets.folder(made.target))
    # Every step drafts the checkpoint's length; the default, "auto", may draft less.
    fixed = {"num_speculative_tokens_per_batch_size": [[1, 64, made.num_drafts]]}
    spec = {"model": str(folder), **made.settings, **fixed}
    with vllm_runner(
        targets.folder(made.target), speculative_config=spec, **SIZES
    ) as llm:
        detected = f"] Drafter {folder}: family {made.family!r}, method {made.method}, "
        assert llm.log.count(detected) == 1
        assert llm.call(drafter_name).endswith("Drafter")
        llm.watch(Drafts)
        served, sampled = llm.generate(GREEDY), llm.generate(SEEDED + FREE)
    target = targets.model(made.target)
    assert_output_matches(target, GREEDY, served)
    seeded, (free,) = replace(sampled, outputs=sampled.outputs[:1]), sampled.tokens[1:]
    assert_output_matches(target, SEEDED, seeded)
    assert len(free) == 6 and max(free) < target.config.vocab_size
    texts, oracle = served.texts(GREEDY), oracle_for(made, folder, target)
    assert compare_drafts(served.drafts, texts, oracle, made.width) >= 20
    # A drafter that always drafts the same tokens would prove nothing.
    assert len({token for *_, drafted in served.drafts for token in drafted}) > 20


def test_head_names_its_target(targets, vllm_runner, tmp_path):
    made = PUBLISHED[SERVED_ALONE]
    target = targets.folder(made.target)
    folder = write_drafter(SERVED_ALONE, tmp_path / "head", target)
    # Only names of repositories on the hub are accepted.
    with pytest.raises(EngineError, match="which is no model on the hub"):
        vllm_runner(folder, **SIZES)


def acceptance(served: Served) -> list[float]:
    """Share of draft steps in which the draft at each position was accepted."""
    drafts = served.count("num_drafts")
    return [count / drafts for count in served.counters["num_accepted_tokens_per_pos"]]


@pytest.mark.parametrize("name", only_fast(("qwen3", WINDOWED), "qwen3"))
def test_target_as_its_own_draft_model(name: str, targets, vllm_runner, on_cpu):
    """It sees the same input, also in chunks, so every draft is accepted."""
    skip_without_experts(name, on_cpu)
    folder = targets.folder(name)
    spec = {"model": str(folder), "method": "draft_model", "num_speculative_tokens": 4}
    with vllm_runner(
        folder, speculative_config=spec, **SIZES | {"max_num_batched_tokens": 20}
    ) as llm:
        served = llm.generate(GREEDY)
    assert_output_matches(targets.model(name), GREEDY, served)
    assert set(acceptance(served)) == {1.0}
    assert served.count("num_drafts") > 3
