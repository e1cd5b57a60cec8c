# SPDX-License-Identifier: Apache-2.0
"""Draft models of other vocabularies draft as the one in the target's vocabulary."""

from pathlib import Path
from typing import Any

import pytest

from .made_up_times import make_up_times
from .other_vocabulary import in_target_ids, with_other_vocabulary
from .recorded import Replays
from .runner import BOUND, NUM_DEVICES, Request, Served
from .test_unified_speculator import only_fast, speculative

DRAFTS = 6
PROBABILISTIC = {"draft_sample_method": "probabilistic"}
IN_PASSES = {"parallel_drafting_width": 4, "use_local_argmax_reduction": True}
SAMPLED = ({}, {"seed": 7, "temperature": 1.0}, {"seed": 8, "temperature": 0.5})


TINY = {"max_num_batched_tokens": 32, "max_num_seqs": 3}
# Drafter, keys of the speculative config, one in how many of the target's tokens it
# lacks, and arguments of the engine.
CASES: dict[str, tuple[str, dict[str, Any], int | None, dict[str, Any]]] = {
    "draft": ("draft", {}, None, {}),
    "local argmax": ("draft", {"use_local_argmax_reduction": True}, None, {}),
    "probabilistic": ("draft", PROBABILISTIC, None, {}),
    "probabilistic masks": ("pard", PROBABILISTIC, None, {}),
    "states": ("pard2", {}, None, {}),
    "tree": ("pard", {"draft_tree": 15}, None, {}),
    "trimmed": ("pard", {"enable_adaptive_verification": True}, None, {}),
    "lacking": ("draft", {}, 5, {"async_scheduling": True, "graphs": True}),
    "lacking masks": ("pard", IN_PASSES, 5, TINY),
    "lacking states": ("pard2", {}, 5, {"graphs": True}),
    # Each has a part of both vocabularies.
    "two ranks": ("draft", {}, None, {"tensor_parallel_size": 2, "env": BOUND}),
}


@pytest.mark.parametrize("name", only_fast(CASES, "lacking", "lacking masks"))
def test_drafts_are_common_tokens(
    name: str, vllm_runner, models: Path, make_prompt, tmp_path: Path
):
    """Output, and drafted and accepted tokens at each position, are the same.

    The other drafter also has likelier tokens of its own.
    """
    mode, keys, lacks_every, engine = CASES[name]
    if "tensor_parallel_size" in engine and NUM_DEVICES < 2:
        pytest.skip("needs two GPUs, or two cores")
    drafter, target = models / mode, models / "target"
    other = with_other_vocabulary(drafter, target, tmp_path / "other", lacks_every)
    same = in_target_ids(drafter, other, tmp_path / "same")
    requests = [
        Request(make_prompt(30 + 7 * i, 60 + i), 24, **sampling)
        for i, sampling in enumerate(3 * SAMPLED)
    ]

    def serve(folder: Path, **more: Any) -> Served:
        spec = speculative(models, mode, DRAFTS, **keys, **more)
        sizes = {"max_model_len": 160, "max_num_seqs": 16} | engine
        with vllm_runner(
            speculative_config=spec | {"model": str(folder)},
            setup=[make_up_times],
            **sizes,
        ) as llm:
            served = llm.generate(requests)
            assert llm.log.count("VocabMapping initialized") == len(more)
            assert "graphs" not in sizes or llm.found(Replays)["first"] > 0
        return served

    wanted = serve(same)
    assert wanted.count("num_accepted_tokens") > 50
    found = serve(other.folder, use_heterogeneous_vocab=True)
    assert found.tokens == wanted.tokens
    for name, counts in wanted.counters.items():
        if not name.endswith("_seconds"):
            # Confidence is summed in the order of the drafter's own tokens.
            assert found.counters[name] == pytest.approx(counts, rel=1e-5), name
