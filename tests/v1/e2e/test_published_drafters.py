# SPDX-License-Identifier: Apache-2.0
"""Every family of published drafters, configured by nothing but its folder.

Drafts must equal those of plain PyTorch, token for token.
"""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoints.families import (
    PUBLISHED,
    Published,
    write_drafter,
    write_target,
)

from .conftest import RunEngine
from .engine import EngineError
from .oracle import (
    assert_greedy_output_matches,
    compare_drafts,
    load_model,
    oracle_for,
    seeded_choices,
)
from .test_unified_speculator import only_fast

# One of each family; the others are slow.
FAST = (
    "pard-qwen3",
    "pard2-qwen3",
    "peagle-amazon",
    "peagle-nemo",
    "peagle-specforge",
    "speculators-peagle-qwen3",
    "speculators-eagle3",
    "eagle3-nvidia",
    "eagle3-yuhuili",
)
SERVED_ALONE = "speculators-eagle3"
WINDOWED = "gpt-oss"  # has two KV cache groups; is also its own draft model
PROMPTS = [list(range(100, 105)), list(range(200, 223))]
SEEDED, FREE = {"temperature": 1.0, "seed": 3}, {"temperature": 1.0}


class Targets:
    """The targets' folders and models, created on demand."""

    def __init__(self, folder: Path, tokenizer: Path) -> None:
        self.folder = cache(lambda name: write_target(name, folder / name, tokenizer))
        self.model = cache(lambda name: load_model(self.folder(name)))


@pytest.fixture(scope="module")
def targets(models: Path, tmp_path_factory) -> Targets:
    return Targets(tmp_path_factory.mktemp("targets"), models / "target")


def run(
    run_engine: RunEngine, target: Path, spec: dict[str, Any] | None, **engine: Any
) -> dict[str, Any]:
    """Runs the scenarios; if `spec` is None, `target` is a head that names its own."""
    sampled = {"prompt": PROMPTS[0], "max_tokens": 6}
    scenarios = {
        "greedy": [{"prompt": prompt, "max_tokens": 16} for prompt in PROMPTS],
        "sampled": [sampled | {"sampling": each} for each in (SEEDED, FREE)],
    }
    sizes = {"max_model_len": 96, "max_num_seqs": 4, "max_num_batched_tokens": 64}
    return run_engine(
        scenarios,
        model=target,
        speculative_config=spec,
        record_drafts=True,
        **sizes | engine,
    )


def skip_without_experts(target: str, on_cpu: bool) -> None:
    """Skips on a GPU if `_moe_C`, which runs mixtures of experts, is not installed."""
    import vllm._custom_ops  # noqa: F401  (loads the available extensions)

    is_windowed = target.startswith(WINDOWED)
    if is_windowed and not on_cpu and not hasattr(torch.ops._moe_C, "topk_softmax"):
        pytest.skip("gpt-oss runs on _moe_C.topk_softmax, which is not installed")


@pytest.mark.parametrize("name", only_fast(PUBLISHED, *FAST))
def test_drafts_match_pytorch(name, targets, run_engine, on_cpu, tmp_path):
    made = PUBLISHED[name]
    skip_without_experts(made.target, on_cpu)
    folder = write_drafter(name, tmp_path / name, targets.folder(made.target))
    # Every step drafts the checkpoint's length; the default, "auto", may draft less.
    fixed = {"num_speculative_tokens_per_batch_size": [[1, 64, made.num_drafts]]}
    spec = {"model": str(folder), **made.settings, **fixed}
    result = run(run_engine, targets.folder(made.target), spec)
    assert_drafts(made, result, folder, targets.model(made.target))


def test_head_names_its_target(targets, run_engine, tmp_path):
    made = PUBLISHED[SERVED_ALONE]
    target = targets.folder(made.target)
    folder = write_drafter(SERVED_ALONE, tmp_path / "head", target)
    # Only names of repositories on the hub are accepted.
    with pytest.raises(EngineError, match="which is no model on the hub"):
        run(run_engine, folder, None)


def assert_drafts(
    made: Published, result: dict[str, Any], folder: Path, target: torch.nn.Module
) -> None:
    assert result["drafter"].endswith("Drafter") and result["leaked_blocks"] == 0
    detected = f"] Drafter {folder}: family {made.family!r}, method {made.method}, "
    assert result["log"].count(detected) == 1
    found, sampled = (result["scenarios"][key] for key in ("greedy", "sampled"))
    assert_greedy_output_matches(target, PROMPTS, found["tokens"])
    with_seed, free = sampled["tokens"]
    text, first = PROMPTS[0] + with_seed, len(PROMPTS[0])
    assert with_seed == seeded_choices(target, text, first, **SEEDED)
    assert len(free) == 6 and max(free) < target.config.vocab_size
    texts = [p + t for p, t in zip(PROMPTS, found["tokens"], strict=True)]
    oracle, drafts = oracle_for(made, folder, target), found["drafts"]
    assert compare_drafts(drafts, texts, oracle, made.width) >= 20
    # A drafter that always drafts the same tokens would prove nothing.
    assert len({token for *_, drafted in drafts for token in drafted}) > 20


def acceptance(found: dict[str, Any]) -> list[float]:
    """Share of draft steps in which the draft at each position was accepted."""
    counters = found["counters"]
    drafts = counters["num_drafts"][0]
    return [count / drafts for count in counters["num_accepted_tokens_per_pos"]]


@pytest.mark.parametrize("name", only_fast(("qwen3", WINDOWED), "qwen3"))
def test_target_as_its_own_draft_model(name: str, targets, run_engine, on_cpu):
    """It sees the same input, also in chunks, so every draft is accepted."""
    skip_without_experts(name, on_cpu)
    folder = targets.folder(name)
    spec = {"model": str(folder), "method": "draft_model", "num_speculative_tokens": 4}
    result = run(run_engine, folder, spec, max_num_batched_tokens=20)
    found = result["scenarios"]["greedy"]
    assert_greedy_output_matches(targets.model(name), PROMPTS, found["tokens"])
    assert set(acceptance(found)) == {1.0}
    assert found["counters"]["num_drafts"][0] > 3
