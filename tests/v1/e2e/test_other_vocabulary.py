# SPDX-License-Identifier: Apache-2.0
"""Draft models of other vocabularies: output and drafts equal plain PyTorch's."""

from pathlib import Path
from typing import Any

import pytest

from .made_up_times import make_up_times
from .oracle import assert_output_matches, compare_drafts
from .other_vocabulary import OtherVocabulary, in_target_ids, with_other_vocabulary
from .recorded import Replays
from .runner import Request, Served
from .test_unified_speculator import (
    ENGINES,
    MAX_MODEL_LEN,
    MODES,
    PARALLEL,
    TINY_WIDTH,
    assert_no_fallback,
    only_fast,
    oracle_of,
    scenarios,  # noqa: F401  (a fixture)
    speculative,
)
from .watches import Drafts

LACKS_EVERY = 5
DRAFTS = 6
CASES = [
    f"{mode}-{engine}" for mode in ("draft", "pard", "pard2") for engine in ENGINES
]
FAST = ("draft-ahead", "pard-tiny")
# Drafters, and keys of the speculative config.
RENUMBERED: dict[str, tuple[str, dict[str, Any]]] = {
    "draft": ("draft", {}),
    "local argmax": ("draft", {"use_local_argmax_reduction": True}),
    "probabilistic": ("draft", {"draft_sample_method": "probabilistic"}),
    "probabilistic masks": ("pard", {"draft_sample_method": "probabilistic"}),
    "states": ("pard2", {}),
    "tree": ("pard", {"draft_tree": 15}),
    "trimmed": ("pard", {"enable_adaptive_verification": True}),
}
SIZES = {"max_model_len": 160, "max_num_seqs": 16}
SAMPLED = ({}, {"seed": 7, "temperature": 1.0}, {"seed": 8, "temperature": 0.5})


@pytest.fixture
def other(models: Path, tmp_path: Path):
    def make(mode: str, lacks_every: int | None = None) -> OtherVocabulary:
        target = models / "target"
        return with_other_vocabulary(
            models / mode, target, tmp_path / mode, lacks_every
        )

    return make


def speculative_of(models, mode: str, made: OtherVocabulary, **more: Any):
    spec = speculative(models, mode, DRAFTS, use_heterogeneous_vocab=True, **more)
    return spec | {"model": str(made.folder)}


@pytest.mark.parametrize("case", only_fast(CASES, *FAST))
def test_drafts_are_common_tokens(
    case: str,
    vllm_runner,
    models,
    target,
    other,
    scenarios,  # noqa: F811
):
    """With greedy drafts, in CUDA graphs or with local argmax reduction.

    The drafter lacks some of the target's tokens.
    """
    mode, engine = case.split("-")
    is_tiny, width, more = engine == "tiny", 1, {}
    if mode in PARALLEL:
        width = TINY_WIDTH if is_tiny else DRAFTS
        more = {"parallel_drafting_width": width} if is_tiny else {}
    if is_tiny:
        more["use_local_argmax_reduction"] = True
    made = other(mode, LACKS_EVERY)
    oracle = in_target_ids(oracle_of(mode, made.folder.parent, target), made)
    with vllm_runner(
        graphs=not is_tiny,
        speculative_config=speculative_of(models, mode, made, **more),
        max_model_len=MAX_MODEL_LEN,
        **ENGINES[engine],
    ) as llm:
        assert llm.log.count("VocabMapping initialized") == 1
        assert_no_fallback(llm.log, MODES[mode]["method"], DRAFTS, width)
        llm.watch(Drafts)
        for asked in (scenarios["lengths"][:5], scenarios["aborts"]):
            served = llm.generate(asked)
            assert_output_matches(target, asked, served)
            assert served.count("num_accepted_tokens") > 0
            texts, every = served.texts(asked), 8
            assert compare_drafts(
                served.drafts, texts, oracle, width, every, MAX_MODEL_LEN
            )
        assert is_tiny or llm.found(Replays)["first"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("how", RENUMBERED)
def test_renumbered_tokens_change_nothing(
    how: str, vllm_runner, models, other, make_prompt
):
    """Neither the output nor the drafted and accepted tokens at each position."""
    mode, more = RENUMBERED[how]
    requests = [
        Request(make_prompt(30 + 7 * i, 60 + i), 24, **sampling)
        for i, sampling in enumerate(3 * SAMPLED)
    ]

    def serve(spec: dict[str, Any]) -> Served:
        with vllm_runner(
            speculative_config=spec, setup=[make_up_times], **SIZES
        ) as llm:
            return llm.generate(requests)

    wanted = serve(speculative(models, mode, DRAFTS, **more))
    assert wanted.count("num_accepted_tokens") > 50
    found = serve(speculative_of(models, mode, other(mode), **more))
    assert found.tokens == wanted.tokens
    for name, counts in wanted.counters.items():
        if not name.endswith("_seconds"):
            # Confidence is summed in the order of the drafter's own tokens.
            assert found.counters[name] == pytest.approx(counts, rel=1e-5), name
