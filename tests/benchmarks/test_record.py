# SPDX-License-Identifier: Apache-2.0
"""The trees that an engine grows become rows of a recording."""

from types import SimpleNamespace

import pytest
import torch

from benchmarks.spec_decode import record
from benchmarks.spec_decode.traces import NO_NODE, Trace, tokens_per_step

PROMPT, ANSWER = [7, 7, 7], [1, 2, 3, 4, 5]
# By step, [depth, candidates]: the text goes on with (2, 3) and with (3, 4).
TOKENS = torch.tensor([[[2, 9], [8, 3]], [[9, 3], [4, 8]], [[8, 9], [8, 9]]])
PARENTS = torch.tensor([0, 1, 0, 1, -1])  # best, its best, the next two, none
CANDIDATES = torch.tensor([0, 2, 1, 3, 0])  # of the flat table
SLOT = 2


@pytest.fixture
def engine(monkeypatch):
    """An engine's speculator, whose trees are of one shape."""
    monkeypatch.setattr(record.GPUModelRunner, "load_model", lambda runner: None)
    monkeypatch.setattr(record.Scheduler, "update_draft_token_ids", None)
    for module in (record.sampler, record.lattice):
        monkeypatch.setattr(module, "grow_trees", lambda *args, **kwargs: None)

    def start(module, *next_rows):
        trees = SimpleNamespace(parents=torch.full((4, 5), -1))
        trees.parents[SLOT] = PARENTS

        def propose(input_batch, **_):
            step = int(input_batch.seq_lens[0]) - len(PROMPT)
            tokens = TOKENS[step % 3][None]
            states, drafts = torch.tensor([SLOT]), tokens.flatten()[None, CANDIDATES]
            tokens = tokens[:, :, None].expand(1, 2, 2 if next_rows else 1, 2)
            log_probs = torch.tensor([0.75, 0.25]).log().expand(tokens.shape)
            batch = log_probs, tokens, None, states, None, trees, drafts
            module.grow_trees(*batch, 5, *next_rows)
            return drafts

        runner = SimpleNamespace(speculator=SimpleNamespace(propose=propose))
        record.GPUModelRunner.load_model(runner)
        return runner.speculator

    return start


@pytest.mark.parametrize(
    "module, is_one_row, has_passes",
    [
        (record.sampler, True, False),
        (record.sampler, False, True),
        (record.lattice, False, False),
    ],
)
def test_rows(engine, module, is_one_row, has_passes, tmp_path):
    recorder = record.Recorder()
    next_rows = torch.tensor([0, 1]).expand(1, 2, 2, 2)
    speculator = engine(module, *[] if is_one_row else [next_rows])
    for length in range(3, 8):
        batch = SimpleNamespace(
            req_ids=["0-a"], num_reqs=1, seq_lens=torch.tensor([length])
        )
        speculator.propose(batch)
    recorder.add([PROMPT], [ANSWER])
    recorder.take({}).save(tmp_path / "text.npz")
    found = Trace.load("text", tmp_path)
    assert found.lengths.tolist() == [3] and found.has_passes == has_passes
    assert found.parents.tolist() == [[0, 1, 0, 1, NO_NODE]] * 3
    assert found.confidence == pytest.approx(0.75, rel=0.07)
    assert found.reached.tolist() == [4, 3, 0] and found.chain.tolist() == [1, 0, 0]
    assert found.accepted(2, 5).tolist() == [2, 1, 0]
    assert tokens_per_step(found, 2) == pytest.approx(1 + 1 / 2)


def test_no_draft_is_verified(engine):
    record.Recorder()
    assert record.Scheduler.update_draft_token_ids(None, "drafts") is None
