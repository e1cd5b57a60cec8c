# SPDX-License-Identifier: Apache-2.0
"""Output equals the target's while the draft length changes from step to step."""

from typing import Any

import pytest

from .hooks import drafter_name, timed_requests
from .made_up_times import make_up_times
from .oracle import assert_output_matches, compare_drafts
from .other_drafters import SIZE, save_counting_model, save_random_dflash
from .recorded import Replays
from .runner import Request, VllmRunner
from .target_models import save_target
from .test_unified_speculator import (
    MODES,
    PARALLEL,
    only_fast,
    oracle_of,
    speculative,
)
from .watches import Drafts

# Batches of 8 shrink to 1, with sizes in between that draft nothing.
SLOW = pytest.mark.slow
SCHEDULE = [[1, 2, 3], [3, 4, 0], [5, 8, 7]]
ENGINE = {"max_num_seqs": 8, "max_num_batched_tokens": 256, "max_model_len": 320}


@pytest.fixture(scope="module")
def requests(make_prompt) -> list[Request]:
    """A batch that shrinks to one request."""
    return [Request(make_prompt(24 + 9 * i, 70 + i), 8 + 8 * i) for i in range(8)]


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


@pytest.mark.parametrize("mode", only_fast(("eagle3", "pard"), "pard"))
def test_auto(mode: str, start, target, requests):
    with start(mode, 3, "auto") as llm:
        served = llm.generate(requests)
        sizes = llm.call(timed_requests)
    assert_output_matches(target, requests, served)
    # One request, and at least one larger batch, depending on the machine's speed.
    assert sizes[0] == 1 and len(sizes) > 1
    assert served.count("num_drafts") > 0


@pytest.mark.parametrize("schedule", [None, pytest.param("auto", marks=SLOW)])
@pytest.mark.parametrize("mode", only_fast(("eagle3", "pard"), "pard"))
def test_requests_that_refuse_drafts(mode: str, schedule, start, target, requests):
    """Alone, and in batches with others, which keep their drafts and graphs."""
    refuses = {"extra_args": {"disable_spec_decode": True}}
    asked = [
        Request(one.prompt, one.params.max_tokens, **(refuses if i % 2 else {}))
        for i, one in enumerate(requests)
    ]
    is_fixed = schedule is None
    with start(mode, 3, schedule, graphs=is_fixed) as llm:
        shrinking, alone = llm.generate(asked), llm.generate(asked[-1:])
        assert not is_fixed or llm.found(Replays)["first"] > 0
    assert_output_matches(target, asked, shrinking)
    assert_output_matches(target, asked[-1:], alone)
    assert alone.count("num_drafts") == 0
    if is_fixed:
        assert shrinking.count("num_accepted_tokens") > 0
    else:  # no step with the longest drafts, as no request could use them
        assert alone.counters["num_steps"][3] == 0


@pytest.mark.slow
def test_auto_in_bfloat16(vllm_runner, tmp_path):
    """The first step that is timed has one row: on a CPU only attention uses AMX."""
    save_target("Llama", tmp_path)
    spec = {"model": str(tmp_path), "num_speculative_tokens": 4}
    spec |= {"method": "draft_model", "num_speculative_tokens_per_batch_size": "auto"}
    engine = {"skip_tokenizer_init": True, "max_num_batched_tokens": 48}
    with vllm_runner(
        tmp_path,
        speculative_config=spec,
        dtype="bfloat16",
        max_model_len=160,
        max_num_seqs=4,
        **engine,
    ) as llm:
        assert llm.generate([Request([1, 2, 3], 8)]).tokens


@pytest.mark.parametrize("drafts_right", [False, pytest.param(True, marks=SLOW)])
def test_auto_with_mtp(drafts_right: bool, vllm_runner, tmp_path):
    """Passes are skipped if they do not pay."""
    spec = {
        "method": "mtp",
        "num_speculative_tokens": 3,
        "num_speculative_tokens_per_batch_size": "auto",
    }
    prompts = [[(31 * i + 17 * n) % SIZE for n in range(9 + i)] for i in range(6)]
    requests = [Request(prompt, 60) for prompt in prompts]
    how = ENGINE | {
        "model": save_counting_model(tmp_path / "model", drafts_right),
        "skip_tokenizer_init": True,
    }
    with vllm_runner(**how) as llm:
        wanted = llm.generate(requests).tokens
    with vllm_runner(speculative_config=spec, setup=[make_up_times], **how) as llm:
        assert llm.call(drafter_name) == "EagleDrafter"
        sizes = llm.call(timed_requests)
        assert sizes[0] == 1 and len(sizes) > 1
        llm.watch(Drafts)
        served = llm.generate(requests)
    assert served.tokens == wanted
    drafts, accepted = map(served.count, ("num_drafts", "num_accepted_tokens"))
    lengths = [len(tokens) for _, _, tokens in served.drafts]
    if drafts_right:
        assert accepted > drafts
        assert set(lengths[-20:]) == {3}
    else:
        assert lengths[0] > 0 and accepted < drafts / 10
        # One entry per request and step with drafts: some steps at first, then none.
        assert len(lengths) < 6 * 60 / 3


@SLOW
@pytest.mark.parametrize(
    "method, drafter", [("dflash", "DFlash"), ("ngram", "NgramGPUSpeculator")]
)
def test_auto_with_methods_that_always_draft_all(
    method: str, drafter: str, vllm_runner, models, tmp_path, target, requests, on_cpu
):
    """Only drafts that pay are verified: next to none with a random drafter."""
    if method == "ngram" and on_cpu:
        pytest.skip("vLLM's n-gram drafts need a backend of Triton's own.")
    spec = {
        "method": method,
        "num_speculative_tokens": 3,
        "num_speculative_tokens_per_batch_size": "auto",
    }
    if method == "dflash":
        spec["model"] = str(save_random_dflash(models / "target", tmp_path / "drafter"))
    else:
        spec["prompt_lookup_max"] = 2
    with vllm_runner(speculative_config=spec, setup=[make_up_times], **ENGINE) as llm:
        assert drafter in llm.call(drafter_name)  # with trees on a GPU
        served = llm.generate(requests)
    assert_output_matches(target, requests, served)
    verified = served.count("num_drafts")
    assert verified > 0
    if method == "dflash":
        assert verified < sum(one.params.max_tokens for one in requests) / 3
