# SPDX-License-Identifier: Apache-2.0
"""Recorded acceptance: its files, its reference, and its replay on a device."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from benchmarks.spec_decode import trace_acceptance, traces
from benchmarks.spec_decode.trace_acceptance import (
    Replay,
    replay_chains,
    replay_confidence,
    replay_in_every_runner,
    replay_trees,
)
from benchmarks.spec_decode.traces import NO_RANK, Trace

# Tokens a step of the bundled PARD, measured without any of this code: the best chain,
# and best-first trees of 7, 15, 31 and 63 nodes.
MEASURED = {
    "pard-greedy": (3.00, [3.31, 3.66, 3.94, 4.20]),
    "pard-t0.5": (3.12, [3.43, 3.83, 4.09, 4.32]),
}


def random_trace(rows: int = 60, width: int = 16, seed: int = 0) -> Trace:
    rng = np.random.default_rng(seed)
    probs = -np.sort(-rng.dirichlet(np.full(2 * width, 0.2), (rows, 8)))[..., :width]
    ranks = rng.choice([0, 0, 0, 1, 2, NO_RANK], size=(rows, 8)).astype(np.uint8)
    return Trace(probs.astype(np.float32), ranks, np.array([rows - 9, 9]), {})


@pytest.mark.parametrize("name", MEASURED)
def test_recordings_give_the_measured_tokens_a_step(name):
    trace = Trace.load(name)
    chain, trees = MEASURED[name]
    assert traces.tokens_per_step(trace, 8) == pytest.approx(chain, abs=0.1)
    for nodes, expected in zip((7, 15, 31, 63), trees, strict=True):
        found = traces.tokens_per_step(trace, 8, nodes)
        assert found == pytest.approx(expected, abs=0.1)


def test_a_saved_trace_is_loaded_again(tmp_path):
    trace = random_trace()
    trace.save(tmp_path / "some.npz")
    loaded = Trace.load("some", tmp_path)
    np.testing.assert_array_equal(loaded.ranks, trace.ranks)
    np.testing.assert_array_equal(loaded.lengths, trace.lengths)
    likely = trace.probs > 1e-6
    off = np.log(loaded.probs[likely] / trace.probs[likely])
    assert np.abs(off).max() <= traces.NATS / 2 + 1e-5
    with pytest.raises(ValueError, match="choose one of some"):
        Trace.load("other", tmp_path)


def test_best_first_takes_the_likeliest_paths():
    probs = random_trace().probs[0, :, :4]
    tree = traces.best_first(probs, 24)
    score = [1.0]
    for depth, parent, rank in zip(*tree, strict=True):
        score.append(score[parent] * float(probs[depth - 1, rank]))
    nodes = list(zip(*tree, strict=True))
    assert len(set(nodes)) == 24 and all(p < i + 1 for i, (_, p, _) in enumerate(nodes))
    taken, least = set(nodes), min(score[1:])
    # What is left out, a child or a sibling of what is in, is no likelier.
    for node, (depth, *_) in enumerate([(0, 0, 0), *nodes]):
        for rank in range(4 if depth < 8 else 0):
            if (depth + 1, node, rank) not in taken:
                assert score[node] * float(probs[depth, rank]) <= least + 1e-12


def test_a_walk_goes_on_behind_what_was_accepted():
    trace = random_trace(12)
    lengths = np.array([4, 3])
    trace = Trace(trace.probs[:7], trace.ranks[:7], lengths, {})
    assert traces.walk(trace, [1, 9, 0, 9, 7, 9, 9]) == [[1, 0, 9], [7]]


def test_rows_wrap_and_differ_by_slot_and_round():
    replay = Replay("cpu", 4)
    replay.load(random_trace())
    slots = torch.arange(4)
    rows = replay.rows(slots, torch.full((4,), 59))
    assert rows.tolist() == ((replay.starts + 59) % 60).tolist()
    assert len(set(rows.tolist())) == 4
    before = replay.starts.clone()
    replay.load(random_trace(), number=1)
    assert not (before == replay.starts).any()


def test_a_trace_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="room is for"):
        Replay("cpu", 1).load(random_trace(width=17))


def test_chains_are_accepted_as_the_reference_says():
    trace, replay = random_trace(), Replay("cpu", 1)
    replay.load(trace)
    chains = replay.accepted_of_chain(torch.arange(60), torch.full((60,), 5))
    expected = [traces.accepted_of_chain(r, 5) for r in trace.ranks.tolist()]
    assert chains.tolist() == expected


def walk(tree: traces.Tree, tokens: list[int], drawn: list[int]) -> list[int]:
    """The nodes that a walk along drawn tokens accepts."""
    path = [0]
    while path[-1] is not None:
        children = [i for i, p in enumerate(tree.parent, start=1) if p == path[-1]]
        held = {tokens[child]: child for child in children}
        assert len(held) == len(children)
        path.append(held.get(drawn[path[-1]]))
    return path[1:-1]


@pytest.mark.parametrize("depth,width", [(8, 16), (7, 8), (3, 2)])
def test_trees_are_drafted_and_accepted_as_recorded(monkeypatch, depth, width):
    from vllm.v1.worker.gpu.spec_decode.draft_tree import drafting, sampler
    from vllm.v1.worker.gpu.spec_decode.unified import speculator as unified

    trace, replay = random_trace(), Replay("cpu", 60)
    monkeypatch.setattr(unified, "sample_chain", None)
    replay.load(trace)
    replay.starts.copy_(torch.arange(60))
    shape = 60 * depth, width
    own = torch.zeros(shape), torch.zeros(shape, dtype=torch.int32)
    monkeypatch.setattr(drafting, "rank_candidates", lambda *args: own)
    drawn = lambda self, logits, *args: torch.zeros(len(logits), dtype=torch.int64)  # noqa: E731
    monkeypatch.setattr(sampler.TreeRejectionSampler, "_draw", drawn)
    replay_trees(replay)

    positions = torch.arange(depth) + 120 + torch.zeros(60, 1, dtype=torch.int64)
    batch = SimpleNamespace(
        idx_mapping=torch.arange(60), sample_positions=positions.flatten()
    )
    speculator = SimpleNamespace(buffers=SimpleNamespace(batch=batch))
    hidden = torch.zeros(60, depth, 4)
    log_probs, tokens = drafting.rank_candidates(speculator, hidden, None)
    tokens = tokens.view(60, depth, width)
    probs = traces.among_candidates(trace.probs[:, :depth], width)
    expected = torch.from_numpy(probs)
    torch.testing.assert_close(log_probs.exp().view(60, depth, width), expected)

    for row in range(60):
        tree = traces.best_first(probs[row], 20)
        depths = torch.tensor(tree.depth)
        local = torch.arange(len(depths) + 1)
        trees = SimpleNamespace(depths=depths.int().expand(60, -1))
        found = sampler.TreeRejectionSampler._draw(
            SimpleNamespace(trees=trees, has_trees=True),
            torch.zeros(len(local), 1),
            None,
            120 + torch.tensor([0, *tree.depth]),
            torch.full_like(local, row),
            local.int(),
        )
        held = tokens[row, depths - 1, torch.tensor(tree.rank)].tolist()
        path = walk(tree, [-1, *held], found.tolist())
        assert path == traces.accepted_of_tree(trace.ranks[row, :depth].tolist(), tree)


def make_replay() -> Replay:
    replay = Replay("cpu", 4)
    replay.load(random_trace())
    return replay


def test_runner_v2_accepts_chains_as_recorded():
    replay = make_replay()
    slots, starts = torch.tensor([3, 0, 2]), torch.tensor([0, 8, 9, 13])
    positions = torch.arange(13) + 100
    asked = {}

    def verify(*args):
        asked["args"] = args
        return "logits", "tokens", torch.tensor([8, 1, 2], dtype=torch.int32)

    sampler = SimpleNamespace(
        synthetic_conditional_rates=torch.zeros(7), _verify=verify
    )
    replay_chains(SimpleNamespace(rejection_sampler=sampler), replay)
    assert sampler.synthetic_conditional_rates.tolist() == [1.0] * 7
    args = "logits", None, "drafts", positions, starts, slots, "more"
    _, _, found = sampler._verify(*args)
    rows = replay.rows(slots, torch.tensor([100, 108, 109]))
    chains = zip(replay.chain[rows].tolist(), [7, 0, 3], strict=True)
    expected = [min(pair) + 1 for pair in chains]
    assert found.dtype == torch.int32 and asked["args"] == args
    assert found.tolist() == [expected[0], 1, min(2, expected[2])]


def test_runner_v1_accepts_chains_as_recorded():
    replay = make_replay()
    tokens = torch.arange(24).view(3, 8)
    metadata = SimpleNamespace(
        cu_num_sampled_tokens=torch.tensor([8, 9, 13]),
        logits_indices=torch.arange(13) + 2,
    )
    sampler = SimpleNamespace(
        synthetic_conditional_rates=torch.zeros(7),
        forward=lambda *args: SimpleNamespace(sampled_token_ids=tokens.clone()),
    )
    runner = SimpleNamespace(rejection_sampler=sampler, positions=torch.arange(20) + 98)
    replay_chains(runner, replay)
    found = sampler.forward(metadata, None, None, None).sampled_token_ids
    rows = replay.rows(torch.arange(3), torch.tensor([100, 108, 109]))
    for i, (row, drafts) in enumerate(zip(rows, [7, 0, 3], strict=True)):
        kept = min(int(replay.chain[row]), drafts) + 1
        assert found[i, :kept].tolist() == tokens[i, :kept].tolist()
        assert (found[i, kept:] == -1).all()


@pytest.mark.parametrize("is_one_pass", [True, False])
def test_adaptive_verification_reads_recorded_confidence(monkeypatch, is_one_pass):
    from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator as Base

    trace, replay, seen = random_trace(), Replay("cpu", 60), []
    replay.load(trace)
    replay.starts.copy_(torch.arange(60))

    def sample_draft(self, hidden_states, positions, slots, draft_step):
        Base._maybe_predict_acceptance(self, hidden_states, slots, draft_step)

    def predict(self, logits, slots, draft_step):
        seen.append(logits)

    monkeypatch.setattr(Base, "sample_draft", sample_draft)
    monkeypatch.setattr(Base, "_maybe_predict_acceptance", predict)
    replay_confidence(replay)
    slots, step = torch.tensor([4, -1, 7]), torch.tensor(3)
    if is_one_pass:
        slots, step = slots.repeat_interleave(2), torch.tensor([3, 4]).repeat(3)
    own = torch.zeros(len(slots), 9)
    Base.sample_draft(
        SimpleNamespace(), own, 120 + step.expand(len(slots)), slots, step
    )
    assert seen[0] is own  # so that it costs what it costs
    found = seen[1].softmax(-1).max(-1).values[slots >= 0]
    expected = trace.probs[[4, 7], 3, 0]
    if is_one_pass:
        expected = trace.probs[[4, 4, 7, 7], [3, 4, 3, 4], 0]
    np.testing.assert_allclose(found, np.clip(expected, 1.5 / 128, 1), atol=1e-5)


@pytest.mark.parametrize("tree", [None, 15])
def test_every_runner_replays_what_it_is_told(monkeypatch, tree: int | None):
    class Runner:
        device = "cpu"
        rejection_sampler = SimpleNamespace(
            synthetic_conditional_rates=torch.zeros(7), _verify=None
        )
        vllm_config = SimpleNamespace(
            scheduler_config=SimpleNamespace(max_num_seqs=4),
            speculative_config=SimpleNamespace(draft_tree=tree),
        )

        def load_model(self, weights: str) -> None:
            self.weights = weights

    told = []
    monkeypatch.setitem(
        sys.modules, "runner_of_a_test", SimpleNamespace(GPUModelRunner=Runner)
    )
    monkeypatch.setattr(trace_acceptance, "RUNNERS", ("runner_of_a_test",))
    monkeypatch.setattr(trace_acceptance, "replay_trees", told.append)
    made = replay_in_every_runner("draft-greedy")
    runner = Runner()
    runner.load_model("dummy")
    assert runner.weights == "dummy" and len(made) == 1
    assert int(made[0].num_rows) == Trace.load("draft-greedy").header["rows"]
    assert told == (made if tree else [])
    assert (Runner.rejection_sampler._verify is None) == bool(tree)


def test_an_engine_that_verifies_for_real_is_refused():
    sampler = SimpleNamespace(synthetic_conditional_rates=None)
    with pytest.raises(ValueError, match="synthetic"):
        replay_chains(SimpleNamespace(rejection_sampler=sampler), make_replay())
