# SPDX-License-Identifier: Apache-2.0
"""Draft trees of the DFlash family: output is the target's, and drafts are right."""

import random

import pytest

from .block_heads import KINDS, PLANTED, K, save_block_head
from .hooks import drafter_name
from .runner import Request
from .target_models import TOKENS, save_target
from .test_targets import (
    ACCEPTED,
    DRAWN,
    ENGINE,
    LENGTHS,
    acceptance,
    greedy_output,
    requests_of,
)
from .watches import Drafts

NODES, SHORT = 15, 2
SETTINGS = {
    "chain": {"num_speculative_tokens": K},
    "tree": {"num_speculative_tokens": K, "draft_tree": NODES},
    # Trees and chains by turns: the chains are shorter, and so are their blocks.
    "both": {
        "num_speculative_tokens": K,
        "draft_tree": NODES,
        "num_speculative_tokens_per_batch_size": [[1, 2, NODES], [3, 4, SHORT]],
    },
}
FAST = ("dflash2-tree", "dspark-both")
CASES = [f"{kind}-{setting}" for kind in PLANTED for setting in SETTINGS]
GRAPHS = pytest.param(False, marks=[pytest.mark.gpu, pytest.mark.slow], id="graphs")
EAGER = [pytest.param(True, id="eager"), GRAPHS]


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


@pytest.mark.parametrize("eager", EAGER)
@pytest.mark.parametrize(
    "case",
    [c if c in FAST else pytest.param(c, marks=pytest.mark.slow) for c in CASES],
)
def test_output_matches_target(
    case: str, eager: bool, vllm_runner, folder, drawn, on_cpu
):
    if on_cpu and not eager:
        pytest.skip("needs a GPU")
    kind, setting = case.split("-")
    spec = {"model": str(folder / kind)} | SETTINGS[setting]
    engine = ENGINE | {"enforce_eager": eager, "speculative_config": spec}
    with vllm_runner(model=folder / "target", **engine) as llm:
        name = llm.call(drafter_name)
        greedy = llm.generate(requests_of("Llama", {}))
        sampled = llm.generate(requests_of("Llama", {}, **DRAWN))
        few = llm.generate(requests_of("Llama", {}, **DRAWN)[:2])
    assert name.startswith("Tree") == (setting != "chain")
    assert greedy.tokens == [greedy_output(length) for length in LENGTHS]
    longest = SHORT if setting == "both" else K
    assert min(acceptance(greedy, longest)) >= ACCEPTED
    assert sampled.tokens + few.tokens == drawn + drawn[:2]
    if setting == "tree":
        assert sum(sampled.counters["num_accepted_tree_nodes"][1:]) > 0
    if setting != "chain":
        assert few.counters["num_accepted_tree_nodes"][0] > 0


@pytest.mark.slow
@pytest.mark.parametrize("length", (K, SHORT))
@pytest.mark.parametrize("kind", KINDS)
def test_chains_are_those_of_vllm(kind: str, length: int, vllm_runner, folder):
    """An engine that also has trees drafts the same chains, for any text."""
    chains = [[1, 4, length]]
    settings = {"draft_tree": NODES, "num_speculative_tokens_per_batch_size": chains}
    rng, drafts = random.Random(kind), []
    texts = [[rng.randrange(TOKENS) for _ in range(9 + 7 * i)] for i in range(4)]
    for more in ({"num_speculative_tokens": length}, settings):
        spec = {"model": str(folder / kind), "num_speculative_tokens": K} | more
        target = folder / "target"
        with vllm_runner(model=target, speculative_config=spec, **ENGINE) as llm:
            assert llm.call(drafter_name).startswith("Tree") == (more is settings)
            llm.watch(Drafts)
            served = llm.generate([Request(text, 24) for text in texts])
        drafts.append(sorted(served.drafts))
    assert drafts[0] == drafts[1]


@pytest.mark.slow
def test_trees_of_random_scores_are_verified(vllm_runner, folder):
    """LiLiCorr, whose scores depend on the last accepted row of the target."""
    spec = {"model": str(folder / "lilicorr")} | SETTINGS["tree"]
    with vllm_runner(model=folder / "target", speculative_config=spec, **ENGINE) as llm:
        assert llm.call(drafter_name) == "TreeLiLiCorr"
        greedy = llm.generate(requests_of("Llama", {}))
    assert greedy.tokens == [greedy_output(length) for length in LENGTHS]
