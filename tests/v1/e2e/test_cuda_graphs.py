# SPDX-License-Identifier: Apache-2.0
"""Compiled engines with CUDA graphs: output equals the target's, drafting never waits.

Each drafter runs with graphs, with draft lengths that change with the batch (by a
schedule, and chosen by the engine), with a tree, with another vocabulary, and eagerly.
"""

from typing import Any

import pytest

from .oracle import assert_output_matches
from .other_vocabulary import with_other_vocabulary
from .recorded import Replays
from .runner import Request
from .test_unified_speculator import MODES
from .watches import forbid_waits

K, MAX_NUM_SEQS = 7, 16
# No drafts at first, and more as requests end.
SCHEDULE = [[1, 4, K], [5, 8, K // 2], [9, MAX_NUM_SEQS, 0]]
# Keys of the speculative config.
HOW: dict[str, dict[str, Any]] = {
    "graphs": {},
    "schedule": {"num_speculative_tokens_per_batch_size": SCHEDULE},
    "auto": {"num_speculative_tokens_per_batch_size": "auto"},
    "tree": {"draft_tree": 15},
    "other vocabulary": {"use_heterogeneous_vocab": True},
    "eager drafter": {"enforce_eager": True},
}
CASES = [
    f"{mode}-{how}"
    for mode, spec in MODES.items()
    for how in HOW
    # Heads draft in the target's vocabulary.
    if how != "other vocabulary" or spec["method"] == "draft_model"
]


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_outputs_with_cuda_graphs(
    vllm_runner, models, target, make_prompt, on_cpu, tmp_path, case: str
):
    if on_cpu:
        pytest.skip("needs a GPU")
    mode, how = case.split("-")
    requests = [Request(make_prompt(16 + 13 * i, i), 100) for i in range(24)]
    drafter = models / mode
    if how == "other vocabulary":
        drafter = with_other_vocabulary(drafter, models / "target", tmp_path).folder
    spec = MODES[mode] | HOW[how] | {"model": str(drafter)}
    with vllm_runner(
        speculative_config=spec | {"num_speculative_tokens": K},
        async_scheduling=True,
        enforce_eager=False,
        max_model_len=1024,
        max_num_seqs=MAX_NUM_SEQS,
    ) as llm:
        llm.watch(Replays)
        llm.call(forbid_waits)
        together = llm.generate(requests)
        assert_output_matches(target, requests, together)
        for one in requests[:4]:
            assert_output_matches(target, [one], llm.generate([one]))
        accepted, drafts = map(together.count, ("num_accepted_tokens", "num_drafts"))
        assert accepted > 0.5 * drafts
        replays = llm.found(Replays)
        assert (replays["first"] > 0) == (how != "eager drafter")
        assert how != "eager drafter" or not any(replays.values())
