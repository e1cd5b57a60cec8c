# SPDX-License-Identifier: Apache-2.0
"""Draft trees of the DFlash family: output is the target's, and drafts are right."""

import pytest

from .block_heads import KINDS, K, save_block_head
from .hooks import drafter_name
from .target_models import save_target
from .test_targets import (
    ACCEPTED,
    DRAWN,
    ENGINE,
    LENGTHS,
    acceptance,
    greedy_output,
    requests_of,
)

NODES = 15
SETTINGS = {
    "chain": {"num_speculative_tokens": K},
    "tree": {"num_speculative_tokens": K, "draft_tree": NODES},
    # Chains and trees by turns, from the same candidates.
    "both": {
        "num_speculative_tokens": K,
        "draft_tree": NODES,
        "num_speculative_tokens_per_batch_size": [[1, 2, NODES], [3, 4, K]],
    },
}
FAST = ("dflash2-tree", "dspark-both")
CASES = [f"{kind}-{setting}" for kind in KINDS for setting in SETTINGS]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("blocks")
    save_target("Llama", folder / "target")
    for kind in KINDS:
        save_block_head(kind, folder / kind)
    return folder


@pytest.fixture(scope="module")
def drawn(folder, vllm_runner):
    """What the target samples without drafts."""
    with vllm_runner(model=folder / "target", **ENGINE) as llm:
        return llm.generate(requests_of("Llama", {}, **DRAWN)).tokens


@pytest.mark.parametrize(
    "case",
    [c if c in FAST else pytest.param(c, marks=pytest.mark.slow) for c in CASES],
)
def test_output_matches_target(case: str, vllm_runner, folder, drawn):
    kind, setting = case.split("-")
    spec = {"model": str(folder / kind)} | SETTINGS[setting]
    with vllm_runner(model=folder / "target", speculative_config=spec, **ENGINE) as llm:
        name = llm.call(drafter_name)
        greedy = llm.generate(requests_of("Llama", {}))
        sampled = llm.generate(requests_of("Llama", {}, **DRAWN))
    assert name.startswith("Tree") == (setting != "chain")
    assert greedy.tokens == [greedy_output(length) for length in LENGTHS]
    assert min(acceptance(greedy)) >= ACCEPTED
    assert sampled.tokens == drawn
    if setting != "chain":
        ranks = sampled.counters["num_accepted_tree_nodes"]
        assert ranks[0] > 0 and (sum(ranks[1:]) > 0 or setting == "both")
