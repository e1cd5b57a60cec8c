# SPDX-License-Identifier: Apache-2.0
"""Output equals the target's while the draft length changes from step to step."""

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from vllm.v1.spec_decode.auto import measure

from .block_heads import save_block_head
from .hooks import drafter_name, timed_requests
from .made_up_times import make_up_times
from .mtp_targets import save_mtp_target
from .oracle import assert_output_matches, compare_drafts
from .recorded import Replays
from .runner import Request, VllmRunner
from .target_models import TOKENS, save_target
from .test_unified_speculator import (
    MODES,
    PARALLEL,
    SAMPLING,
    only_fast,
    oracle_of,
    speculative,
)
from .watches import Drafts

# Batches of 8 shrink to 1, with sizes in between that draft nothing.
SCHEDULE = [[1, 2, 3], [3, 4, 0], [5, 8, 7]]
ENGINE = {"max_num_seqs": 8, "max_num_batched_tokens": 256, "max_model_len": 320}


@pytest.fixture(scope="module")
def requests(make_prompt) -> list[Request]:
    """A batch that shrinks to one request; one has a seed."""
    return [
        Request(
            make_prompt(24 + 9 * i, 70 + i), 8 + 8 * i, **SAMPLING if i == 5 else {}
        )
        for i in range(8)
    ]


@pytest.fixture
def start(vllm_runner, models):
    def start(mode: str, drafts: int, schedule: Any, **how: Any) -> VllmRunner:
        changing = {"num_speculative_tokens_per_batch_size": schedule}
        spec = speculative(models, mode, drafts, **changing)
        return vllm_runner(speculative_config=spec, **ENGINE, **how)

    return start


@pytest.mark.parametrize("mode", only_fast(MODES, "pard2", "eagle3"))
def test_schedule(mode: str, start, models, target, requests):
    """Each length has its own graphs, and some batches are smaller than their graph.

    Drafts that follow steps without drafts are those of plain PyTorch.
    """
    oracle, width = oracle_of(mode, models, target), 7 if mode in PARALLEL else 1
    with start(mode, 7, SCHEDULE, graphs=True) as llm:
        llm.watch(Drafts)
        shrinking, alone = llm.generate(requests), llm.generate(requests[-1:])
        assert not llm.call(timed_requests)
        replays = llm.found(Replays)
    assert_output_matches(target, requests, shrinking)
    assert_output_matches(target, requests[-1:], alone)
    texts = shrinking.texts(requests)
    assert compare_drafts(shrinking.drafts, texts, oracle, width, every=2) > 20
    assert replays["first"] > 0
    assert (replays["later"] > 0) == (mode in ("draft", "eagle3"))
    assert 0 < alone.count("num_draft_tokens") <= 3 * alone.count("num_drafts")
    # Some steps of 8 to 5 requests drafted all 7, those of 2 and 1 only 3.
    drafts, tokens = map(shrinking.count, ("num_drafts", "num_draft_tokens"))
    assert 3 * drafts < tokens < 7 * drafts
    assert alone.counters["num_steps"][7] == 0 < shrinking.counters["num_steps"][7]


def take_time() -> None:
    """Times all loads, however slow the machine is."""
    measure.BUDGET_SECONDS = float("inf")


@pytest.mark.parametrize("mode", only_fast(("eagle3", "pard"), "pard"))
def test_auto(mode: str, start, target, requests, tmp_path):
    """A later start with the same settings times no step: see `test_kept.py`."""
    env = {"VLLM_CACHE_ROOT": str(tmp_path), "VLLM_DISABLE_COMPILE_CACHE": "0"}
    with start(mode, 3, "auto", env=env, setup=[take_time]) as llm:
        sizes = llm.call(timed_requests)
        served = llm.generate(requests)
    assert_output_matches(target, requests, served)
    assert sizes == [1, 2, 4, 8]
    assert served.count("num_drafts") > 0
    (path,) = (tmp_path / "step_times").iterdir()
    times = json.loads(path.read_text())
    times["passes"]["256"] = {"77": times["passes"]["256"]["1"]}
    path.write_text(json.dumps(times))
    with start(mode, 3, "auto", env=env) as llm:
        assert 77 in llm.call(timed_requests) and 77 not in sizes


# Drafter, and whether drafts pay.
WITH_AUTO = {
    "mtp": ("EagleDrafter", True),
    "wrong mtp": ("EagleDrafter", False),
    "dflash": ("LiLiCorr", False),  # vLLM's own always draft all
    "ngram": ("NgramGPUSpeculator", True),
}


@pytest.mark.parametrize("case", only_fast(WITH_AUTO, "wrong mtp"))
def test_auto_of_other_methods(case: str, vllm_runner, tmp_path, on_cpu: bool):
    """With auto, only drafts that pay are made, or at least verified."""
    method, (drafter, pays) = case.removeprefix("wrong "), WITH_AUTO[case]
    if method == "ngram" and on_cpu:
        pytest.skip("vLLM's n-gram drafts need a backend of Triton's own.")
    spec: dict[str, Any] = {"method": method, "num_speculative_tokens": 3}
    spec["num_speculative_tokens_per_batch_size"] = "auto"
    target = tmp_path / "target"
    if method == "mtp":
        save_mtp_target("MiMo's", target)
        if not pays:
            spoil(target / "model.safetensors")
    else:
        save_target("Llama", target)
    if method == "dflash":  # random
        spec["model"] = str(save_block_head("lilicorr", tmp_path / "drafter"))
    elif method == "ngram":
        spec["prompt_lookup_max"] = 2
    # They count through the vocabulary once, so that n-grams occur again.
    prompts = [[(n + i) % TOKENS for i in range(TOKENS + 9)] for n in range(6)]
    with vllm_runner(
        target,
        speculative_config=spec,
        setup=[make_up_times],
        skip_tokenizer_init=True,
        **ENGINE,
    ) as llm:
        assert drafter in llm.call(drafter_name)  # with trees on a GPU
        sizes = llm.call(timed_requests)
        assert sizes[0] == 1 and len(sizes) > 1
        served = llm.generate([Request(prompt, 60) for prompt in prompts])
    for prompt, tokens in zip(prompts, served.tokens, strict=True):
        assert tokens == [(prompt[-1] + i) % TOKENS for i in range(1, 61)]
    drafts, accepted = map(served.count, ("num_drafts", "num_accepted_tokens"))
    if pays:
        assert accepted > drafts
    else:  # some steps at first, then none
        assert 0 < drafts < 6 * 60 / 3 and accepted < drafts / 4


def spoil(file: Path) -> None:
    """Makes the drafts of an MTP module wrong."""
    tensors = load_file(file)
    name = "model.mtp_layers.0.input_proj.weight"
    tensors[name] = tensors[name].roll(7, 0)
    save_file(tensors, file, {"format": "pt"})
