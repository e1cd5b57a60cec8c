# SPDX-License-Identifier: Apache-2.0
"""What passes rank becomes rows of a recording, which are replayed as they were."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from benchmarks.spec_decode import record
from benchmarks.spec_decode.traces import NO_RANK, Trace

PROMPT, ANSWER = [7, 7, 7], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
BEST = [[2, 3, 4, 0, 6, 7, 8, 9], [3, 4, 5, 6, 7, 8, 9, 10]]  # by step, of each depth


@pytest.fixture
def ranked(monkeypatch):
    """Candidates that the next pass has, in a list; the second is one more."""
    found: list[torch.Tensor] = []

    def rank_candidates(sampler, rows, plan):
        probs = torch.tensor([0.75, 0.25]).expand(found[0].shape[0], 2)
        return probs.log(), torch.stack([found[0], found[0] + 1], dim=1)

    sampler = record.DraftSampler
    monkeypatch.setattr(sampler, "rank_candidates", rank_candidates)
    monkeypatch.setattr(sampler, "sample_tree", lambda *args: None)
    monkeypatch.setattr(record.GPUModelRunner, "add_requests", lambda *args: None)
    verifier = record.TreeRejectionSampler
    monkeypatch.setattr(verifier, "_verify", lambda self, *args: args[-1])
    return found


@pytest.mark.parametrize("passes", [1, 8])
def test_rows(ranked, passes, tmp_path):
    recorder = record.Recorder()
    scheduled = SimpleNamespace(scheduled_new_reqs=[SimpleNamespace(req_id="0-a")])
    states = SimpleNamespace(req_id_to_index={"0-a": 5})
    record.GPUModelRunner.add_requests(SimpleNamespace(req_states=states), scheduled)
    samples, plan = 8 // passes, SimpleNamespace()
    plan.layout = SimpleNamespace(num_passes=passes)
    for step, draft_pass in np.ndindex(2, passes):
        first = draft_pass * samples
        ranked[:] = [torch.tensor(BEST[step][first : first + samples])]
        positions = len(PROMPT) + step + first + torch.arange(samples)
        batch = SimpleNamespace(
            idx_mapping=torch.tensor([5]), sample_positions=positions
        )
        sampler = SimpleNamespace(inputs=SimpleNamespace(batch=batch))
        hidden = torch.zeros(1, samples, 4)
        record.DraftSampler.sample_tree(sampler, hidden, plan, draft_pass)
        record.DraftSampler.rank_candidates(sampler, hidden, plan)
    recorder.add([PROMPT], [ANSWER])
    recorder.take({}).save(tmp_path / "text.npz")
    found = Trace.load("text", tmp_path)
    assert found.lengths.tolist() == [2] and found.continues_best == (passes > 1)
    assert found.probs[..., 0] == pytest.approx(0.75, rel=0.07)
    # The fourth draft is wrong: steps of several passes have nothing right behind it.
    behind = [NO_RANK] * 4 if passes > 1 else [0] * 4
    assert found.ranks.tolist() == [[0, 0, 0, NO_RANK, *behind], [0] * 8]


def test_nothing_is_accepted(ranked):
    record.Recorder()
    nodes = record.TreeRejectionSampler._verify(None, "logits", torch.tensor([3, 4]))
    assert nodes.tolist() == [-1, -1]
