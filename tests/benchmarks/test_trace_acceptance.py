# SPDX-License-Identifier: Apache-2.0
"""Replay of recorded acceptance on a device, compared with a reference."""

from importlib import import_module
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from benchmarks.spec_decode.trace_acceptance import (
    FIRST_TOKEN,
    RUNNERS,
    Replay,
    replay_chains,
    replay_confidence,
    replay_in_every_runner,
    replay_trees,
    start_of,
)
from benchmarks.spec_decode.traces import NO_NODE, Trace
from tests.v1.worker.gpu.spec_decode.draft_tree.reference import Node, walk
from vllm.config.drafter import DrafterConfig
from vllm.v1.worker.gpu.spec_decode.unified.tree.trees import DraftTrees
from vllm.v1.worker.gpu.spec_decode.unified.tree.verify import TreeRejectionSampler

PROMPTS = np.random.default_rng(0).integers(0, 1000, (4, 20))


DEPTH, NODES = 8, 63


def random_trace(rows: int = 60) -> Trace:
    """Random trees, some with fewer nodes, and random paths in them."""
    rng = np.random.default_rng(0)
    parents = np.full((rows, NODES), NO_NODE, np.uint8)
    depths = np.zeros((rows, NODES + 1), int)
    for row, node in np.ndindex(rows, NODES - 3):
        above = np.flatnonzero(depths[row, : node + 1] < DEPTH)
        parents[row, node] = parent = rng.choice(above[-6:])
        depths[row, node + 1] = depths[row, parent] + 1
    return Trace(
        parents,
        rng.integers(0, NODES - 2, rows).astype(np.uint8),
        rng.integers(0, DEPTH + 1, rows).astype(np.uint8),
        rng.uniform(size=(rows, DEPTH)).astype(np.float32),
        np.array([rows - 9, 9]),
        {},
    )


def smaller(parents: list[int], reached: int, depth: int, num_nodes: int):
    """The first nodes that are not too deep, and those of the path, from row 0 on."""
    nodes, number = [Node(0, 0, 0)], {0: 0}  # of each node in the smaller tree
    for node, parent in enumerate(parents, 1):
        if parent in number and nodes[number[parent]].depth < depth:
            above = number[parent]
            rank = sum(each.parent == above for each in nodes[1:])
            number[node] = len(nodes)
            nodes.append(Node(above, nodes[above].depth + 1, rank))
    path = []
    while reached:
        path.append(number.get(reached, NO_NODE))
        reached = parents[reached - 1]
    kept = [node for node in reversed(path) if node <= num_nodes]
    return nodes[1 : num_nodes + 1], [0, *kept]


def make_replay() -> Replay:
    replay = Replay("cpu", 4)
    replay.load(random_trace())
    replay.starts.copy_(torch.from_numpy(start_of(PROMPTS)))
    return replay


def test_rows_wrap_and_differ_by_prompt():
    replay = make_replay()
    rows = replay.rows(torch.arange(4), torch.full((4,), 59))
    assert rows.tolist() == ((replay.starts + 59) % 60).tolist()
    assert len(set(rows.tolist())) == 4


@pytest.mark.parametrize("module, kind", RUNNERS)
def test_every_runner_replays(monkeypatch, module: str, kind: str):
    """On Runner V2 a request's start in the trace depends only on its prompt."""
    runner, is_v2 = getattr(import_module(module), kind), module == RUNNERS[0][0]
    monkeypatch.setattr(runner, "load_model", lambda self: None)
    made = replay_in_every_runner()
    sampler = SimpleNamespace(
        synthetic_conditional_rates=torch.zeros(7), _verify=None, forward=None
    )
    spec = SimpleNamespace()
    scheduler = SimpleNamespace(max_num_seqs=4)
    it = SimpleNamespace(
        vllm_config=SimpleNamespace(
            speculative_config=spec, scheduler_config=scheduler
        ),
        device="cpu",
        rejection_sampler=sampler,
        add_requests=lambda scheduled: None,
    )
    if is_v2:
        it.req_states = SimpleNamespace(req_id_to_index={"a": 3, "b": 1})
    runner.load_model(it)
    new = [
        SimpleNamespace(req_id=name, prompt_token_ids=prompt.tolist())
        for name, prompt in zip("ab", PROMPTS, strict=False)
    ]
    it.add_requests(SimpleNamespace(scheduled_new_reqs=new))
    first, second = start_of(PROMPTS)[:2].tolist()
    assert made[0].starts.tolist() == ([0, second, 0, first] if is_v2 else [0] * 4)


@pytest.mark.parametrize("depth, num_nodes", [(8, 63), (8, 20), (6, 31), (2, 9)])
def test_trees_are_planted_as_recorded(depth, num_nodes):
    """The first nodes of a recorded tree are the smaller tree, less deep ones too."""
    trace, replay = random_trace(), Replay("cpu", 60)
    replay.load(trace)
    replay.starts.copy_(torch.arange(60))
    trees = DraftTrees(60, DEPTH, NODES, torch.device("cpu"))
    drafts = torch.zeros(60, num_nodes, dtype=torch.int64)
    newest = torch.full((60,), 120)
    replay.plant(torch.arange(60), newest, drafts, trees, depth)
    for row, parents in enumerate(trace.parents.tolist()):
        reached = int(trace.reached[row])
        nodes, expected = smaller(parents, reached, depth, num_nodes)
        topology = trees.parents, trees.depths, trees.ranks
        found = [each[row, :num_nodes].tolist() for each in topology]
        assert list(zip(*found, strict=True))[: len(nodes)] == nodes
        assert set(found[0][len(nodes) :]) <= {-1}
        held, drawn = [-1, *drafts[row].tolist()], replay.drawn[row].tolist()
        _, path = walk(nodes, held, drawn, chain_only=False)
        assert path == expected
        assert trace.accepted(depth, num_nodes)[row] == len(path) - 1


@pytest.mark.parametrize("k", [1, 5, 8])
def test_chains_of_engines_with_trees(k):
    trace, replay = random_trace(), Replay("cpu", 60)
    replay.load(trace)
    drafts = torch.zeros(60, k, dtype=torch.int64)
    trees = DraftTrees(60, DEPTH, NODES, torch.device("cpu"))
    replay.plant(torch.arange(60), torch.arange(60), drafts, trees, k)
    same = (replay.drawn[:, :k] == drafts).int().cumprod(1).sum(1)
    assert same.tolist() == np.minimum(trace.chain, k).tolist()
    assert (replay.drawn[:, k] == FIRST_TOKEN).all()


def test_engines_with_trees_are_planted_in_their_steps(monkeypatch):
    """Steps call `propose` by position, dummy runs by keyword."""
    monkeypatch.setattr(TreeRejectionSampler, "_draw", None)
    replay, n = Replay("cpu", 60), 3
    replay.load(random_trace())
    drafts = torch.zeros(n, 15, dtype=torch.int64)

    def propose(input_batch, attn, slots, last, aux, num_sampled, dummy_run=False,
                num_speculative_tokens=None):  # fmt: skip
        return drafts

    speculator = SimpleNamespace(
        propose=propose,
        speculative_config=SimpleNamespace(
            draft_tree=15,
            num_speculative_tokens_per_batch_size=None,
            drafter=DrafterConfig("eagle3", DEPTH, num_nodes=15),
        ),
        tree_step=SimpleNamespace(trees=DraftTrees(60, DEPTH, 15, torch.device("cpu"))),
    )
    replay_trees(speculator, replay)
    batch = SimpleNamespace(
        num_reqs=n,
        idx_mapping=torch.arange(n),
        logits_indices=torch.arange(n),
        cu_num_logits=torch.arange(n + 1),
        positions=torch.full((n,), 100),
    )
    given = dict.fromkeys(("attn", "slots", "last", "aux", "num_sampled"))
    speculator.propose(input_batch=batch, **given, dummy_run=True)
    assert not drafts.any()
    speculator.propose(batch, None, None, None, None, torch.ones(n, dtype=torch.int32))
    assert (drafts == FIRST_TOKEN + 1 + torch.arange(15)).all()


def accepted(replay: Replay, slots: list[int], drafts: list[int]) -> list[int]:
    """Tokens per step by the reference, for requests at positions 100, 108 and 109."""
    rows = replay.rows(torch.tensor(slots), torch.tensor([100, 108, 109]))
    return (1 + np.minimum(random_trace().chain[rows], drafts)).tolist()


def test_runner_v2_accepts_chains_as_recorded():
    replay = make_replay()
    slots, starts = torch.tensor([3, 0, 2]), torch.tensor([0, 8, 9, 13])
    verified = torch.tensor([8, 1, 2], dtype=torch.int32)
    sampler = SimpleNamespace(
        synthetic_conditional_rates=torch.zeros(7),
        _verify=lambda *args: ("logits", "tokens", verified),
    )
    replay_chains(SimpleNamespace(rejection_sampler=sampler), replay)
    assert sampler.synthetic_conditional_rates.tolist() == [1.0] * 7
    args = "logits", None, "drafts", torch.arange(13) + 100, starts, slots, "more"
    _, _, found = sampler._verify(*args)
    first, _, last = accepted(replay, [3, 0, 2], [7, 0, 3])
    assert found.tolist() == [first, 1, min(2, last)] and found.dtype == torch.int32


@pytest.mark.parametrize("is_synthetic", [True, False])
def test_runner_v1_accepts_chains_as_recorded(is_synthetic):
    """Without synthetic acceptance, drafts replace the tokens that it rejected."""
    replay = make_replay()
    drafts = torch.arange(10) + 50
    tokens = torch.full((3, 8), -1)
    tokens[:, 0] = torch.tensor([50, 9, 57])
    expected = torch.stack([torch.cat([drafts[:7], drafts[7:8]]), tokens[1], tokens[2]])
    expected[2, :4] = torch.tensor([57, 58, 59, 59])
    if is_synthetic:  # at rates of 1
        tokens = expected
    metadata = SimpleNamespace(
        cu_num_sampled_tokens=torch.tensor([8, 9, 13]),
        draft_token_ids=drafts,
        logits_indices=torch.arange(13) + 2,
    )
    sampler = SimpleNamespace(
        forward=lambda *args: SimpleNamespace(sampled_token_ids=tokens.clone())
    )
    runner = SimpleNamespace(
        rejection_sampler=sampler,
        positions=torch.arange(20) + 98,
        input_batch=SimpleNamespace(token_ids_cpu=PROMPTS),
    )
    replay_chains(runner, replay)
    found = sampler.forward(metadata, None, None, None).sampled_token_ids
    for i, kept in enumerate(accepted(replay, [0, 1, 2], [7, 0, 3])):
        assert found[i, :kept].tolist() == expected[i, :kept].tolist()
        assert (found[i, kept:] == -1).all()


@pytest.mark.parametrize("is_one_pass", [True, False])
def test_adaptive_verification_reads_recorded_confidence(monkeypatch, is_one_pass):
    from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator as Base

    replay, seen = make_replay(), []

    def sample_draft(self, hidden_states, positions, slots, draft_step):
        Base._maybe_predict_acceptance(self, hidden_states, slots, draft_step)

    monkeypatch.setattr(Base, "sample_draft", sample_draft)
    monkeypatch.setattr(
        Base,
        "_maybe_predict_acceptance",
        lambda self, logits, *args: seen.append(logits),
    )
    replay_confidence(replay)
    slots, step = torch.tensor([1, -1, 3]), torch.tensor(3)
    if is_one_pass:
        slots, step = slots.repeat_interleave(2), torch.tensor([3, 4]).repeat(3)
    own, steps = torch.zeros(len(slots), 9), step.expand(len(slots))
    Base.sample_draft(SimpleNamespace(), own, 120 + steps, slots, step)
    assert seen[0] is own  # so that a step does all of its work
    is_real = slots >= 0
    found = seen[1].softmax(-1).max(-1).values[is_real]
    rows = replay.rows(slots[is_real], torch.tensor(120))
    expected = random_trace().confidence[rows, steps[is_real]]
    np.testing.assert_allclose(found, np.clip(expected, 1.5 / 128, 1), atol=1e-5)
