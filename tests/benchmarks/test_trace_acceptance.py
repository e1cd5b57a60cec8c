# SPDX-License-Identifier: Apache-2.0
"""Replay of recorded acceptance on a device, compared with a reference."""

from importlib import import_module
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from benchmarks.spec_decode import traces
from benchmarks.spec_decode.trace_acceptance import (
    RUNNERS,
    Replay,
    replay_chains,
    replay_confidence,
    replay_in_every_runner,
    replay_trees,
    start_of,
)
from benchmarks.spec_decode.traces import NO_RANK, Trace
from tests.v1.worker.gpu.spec_decode.draft_tree.reference import best_first, walk

PROMPTS = np.random.default_rng(0).integers(0, 1000, (4, 20))


def random_trace(rows: int = 60, width: int = 16, seed: int = 0) -> Trace:
    rng = np.random.default_rng(seed)
    probs = -np.sort(-rng.dirichlet(np.full(2 * width, 0.2), (rows, 8)))[..., :width]
    ranks = rng.choice([0, 0, 0, 1, 2, NO_RANK], size=(rows, 8)).astype(np.uint8)
    return Trace(probs.astype(np.float32), ranks, np.array([rows - 9, 9]), {})


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


@pytest.mark.parametrize("depth,width", [(8, 16), (7, 8), (3, 2)])
def test_trees_are_drafted_and_accepted_as_recorded(monkeypatch, depth, width):
    from vllm.v1.worker.gpu.spec_decode.unified.sampler import DraftSampler
    from vllm.v1.worker.gpu.spec_decode.unified.tree.verify import TreeRejectionSampler

    trace, replay = random_trace(), Replay("cpu", 60)
    for name in ("sample_chain", "sample_tree"):
        monkeypatch.setattr(DraftSampler, name, lambda *_: None)
    replay.load(trace)
    replay.starts.copy_(torch.arange(60))
    shape = 60 * depth, width
    own = torch.zeros(shape), torch.zeros(shape, dtype=torch.int32)
    monkeypatch.setattr(DraftSampler, "rank_candidates", lambda *args: own)
    drawn = lambda self, logits, *args: torch.zeros(len(logits), dtype=torch.int64)  # noqa: E731
    monkeypatch.setattr(TreeRejectionSampler, "_draw", drawn)
    replay_trees(replay)

    positions = torch.arange(depth) + 120 + torch.zeros(60, 1, dtype=torch.int64)
    batch = SimpleNamespace(
        idx_mapping=torch.arange(60), sample_positions=positions.flatten()
    )
    sampler = SimpleNamespace(inputs=SimpleNamespace(batch=batch), recorded_pass=0)
    hidden = torch.zeros(60, depth, 4)
    log_probs, tokens = DraftSampler.rank_candidates(sampler, hidden, None)
    tokens = tokens.view(60, depth, width)
    probs = traces.among_candidates(trace.probs[:, :depth], width)
    expected = torch.from_numpy(probs)
    torch.testing.assert_close(log_probs.exp().view(60, depth, width), expected)

    for row, log_probs in enumerate(np.log(probs).tolist()):
        nodes = best_first(log_probs, 20)
        depths = torch.tensor([node.depth for node in nodes])
        local = torch.arange(len(nodes) + 1)
        trees = SimpleNamespace(depths=depths.int().expand(60, -1))
        found = TreeRejectionSampler._draw(
            SimpleNamespace(trees=trees, has_trees=True),
            torch.zeros(len(local), 1),
            None,
            torch.cat([torch.tensor([120]), 120 + depths]),
            torch.full_like(local, row),
            local.int(),
        )
        held = [int(tokens[row, node.depth - 1, node.rank]) for node in nodes]
        _, path = walk(nodes, [-1, *held], found.tolist(), chain_only=False)
        ranks = trace.ranks[row, :depth].tolist()
        assert path[1:] == traces.accepted_of_tree(ranks, nodes)


def accepted(replay: Replay, slots: list[int], drafts: list[int]) -> list[int]:
    """Tokens per step by the reference, for requests at positions 100, 108 and 109."""
    rows = replay.rows(torch.tensor(slots), torch.tensor([100, 108, 109])).tolist()
    ranks = random_trace().ranks.tolist()
    counts = zip(rows, drafts, strict=True)
    return [traces.accepted_of_chain(ranks[row], n) + 1 for row, n in counts]


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
    expected = random_trace().probs[rows, steps[is_real], 0]
    np.testing.assert_allclose(found, np.clip(expected, 1.5 / 128, 1), atol=1e-5)
