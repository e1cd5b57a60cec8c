# SPDX-License-Identifier: Apache-2.0
"""Every family of published drafters, configured by nothing but its folder.

Drafts must equal those of plain PyTorch, token for token.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoints.families import PUBLISHED, write_drafter, write_target

from .hooks import drafter_name
from .oracle import assert_output_matches, compare_drafts, load_model, oracle_for
from .runner import Request
from .test_unified_speculator import only_fast
from .watches import Drafts

# One of each kind; `tests/config` reads the files of all families.
FAST = ("pard2-qwen3", "speculators-peagle-qwen3", "eagle3-yuhuili")
PROMPTS = [list(range(100, 105)), list(range(200, 223))]
GREEDY = [Request(prompt, 16) for prompt in PROMPTS]
SEEDED = [Request(PROMPTS[0], 6, temperature=1.0, seed=3)]
FREE = [Request(PROMPTS[0], 6, temperature=1.0)]
SIZES = {"max_model_len": 96, "max_num_seqs": 4, "max_num_batched_tokens": 64}


@pytest.fixture(scope="module")
def target_of(models: Path, tmp_path_factory) -> Callable[[str], tuple[Path, Any]]:
    """A target's folder and model, which are created on demand."""
    folder = tmp_path_factory.mktemp("targets")

    @cache
    def get(name: str) -> tuple[Path, Any]:
        written = write_target(name, folder / name, models / "target")
        return written, load_model(written)

    return get


def skip_without_experts(target: str, on_cpu: bool) -> None:
    """Skips on a GPU if `_moe_C`, which runs mixtures of experts, is not installed."""
    import vllm._custom_ops  # noqa: F401  (loads the available extensions)

    has_kernel = on_cpu or hasattr(torch.ops._moe_C, "topk_softmax")
    if target.startswith("gpt-oss") and not has_kernel:
        pytest.skip("gpt-oss runs on _moe_C.topk_softmax, which is not installed")


@pytest.mark.parametrize("name", only_fast(PUBLISHED, *FAST))
def test_drafts_match_pytorch(name, target_of, vllm_runner, on_cpu, tmp_path):
    made = PUBLISHED[name]
    skip_without_experts(made.target, on_cpu)
    target_folder, target = target_of(made.target)
    folder = write_drafter(name, tmp_path / name, target_folder)
    # Every step drafts the checkpoint's length; the default, "auto", may draft less.
    fixed = {"num_speculative_tokens_per_batch_size": [[1, 64, made.num_drafts]]}
    spec = {"model": str(folder), **made.settings, **fixed}
    with vllm_runner(target_folder, speculative_config=spec, **SIZES) as llm:
        detected = f"] Drafter {folder}: family {made.family!r}, method {made.method}, "
        assert llm.log.count(detected) == 1
        assert llm.call(drafter_name).endswith("Drafter")
        llm.watch(Drafts)
        served, sampled = llm.generate(GREEDY), llm.generate(SEEDED + FREE)
    assert_output_matches(target, GREEDY, served)
    seeded, (free,) = replace(sampled, outputs=sampled.outputs[:1]), sampled.tokens[1:]
    assert_output_matches(target, SEEDED, seeded)
    assert len(free) == 6 and max(free) < target.config.vocab_size
    texts, oracle = served.texts(GREEDY), oracle_for(made, folder, target)
    assert compare_drafts(served.drafts, texts, oracle, made.width) >= 20
    # A drafter that always drafts the same tokens would prove nothing.
    assert len({token for *_, drafted in served.drafts for token in drafted}) > 20
