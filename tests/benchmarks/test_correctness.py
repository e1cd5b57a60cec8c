# SPDX-License-Identifier: Apache-2.0
"""What is kept of an engine's outputs beside the target's alone."""

import json
from argparse import Namespace
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks.spec_decode import correctness, draft_watch
from benchmarks.spec_decode.correctness import (
    MAX_NUM_SEQS,
    compare,
    gaps,
    judge,
    run_all,
    schedule,
)
from benchmarks.spec_decode.correctness_tables import (
    correctness_table,
    drift_table,
    ranks_table,
    waits_text,
)
from benchmarks.spec_decode.draft_watch import DraftWatch
from benchmarks.spec_decode.even_heads import with_even_heads
from benchmarks.spec_decode.shapes import BUNDLED
from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup

TIE = 0.1
ALONE = {"tokens": [[1, 2, 3], [4, 5, 6]], "gaps": [[9.0] * 3, [9.0, TIE / 2, 9.0]]}
WATCHED = {
    "steps": {"full": 3, "piecewise": 1},
    "graphs_replayed": {"full": 6, "piecewise": 5},
    "drafted": {"0": 1, "7": 3},
    "waiting_steps": {"piecewise": 1},
    "waited_at": ["vllm/v1/x.py:7"],
}
FOUND = {"drafts": 4, "accepted": [2, 1], "watched": WATCHED}


def test_equal_outputs():
    kept = compare({**FOUND, "tokens": ALONE["tokens"]}, ALONE, TIE)
    assert kept["differences"] == [] and kept["are_ties"]
    assert kept["acceptance_length"] == 1.75


def test_a_tie_is_told_from_a_difference():
    tie = compare({**FOUND, "tokens": [[1, 2, 3], [4, 9, 9]]}, ALONE, TIE)
    assert tie["differences"] == [{"request": 1, "token": 1, "logprob_gap": TIE / 2}]
    assert tie["are_ties"]
    wrong = compare({**FOUND, "tokens": [[1, 2, 7], [4, 9, 9]]}, ALONE, TIE)
    assert not wrong["are_ties"]
    rows = correctness_table({"tie": tie, "wrong": wrong}).splitlines()
    counts = "3 full, 1 piecewise | 6 full, 5 piecewise | 1 piecewise | 1 K=0, 3 K=7"
    assert f"| 1 of 2 | yes | 1.75 | 0.50 0.25 | {counts} |" in rows[2]
    assert "| 0 of 2 | **no** |" in rows[3]


def test_gap_is_between_the_two_best():
    def token(rank: int, logprob: float) -> SimpleNamespace:
        return SimpleNamespace(rank=rank, logprob=logprob)

    assert gaps([{7: token(2, -1.5), 8: token(1, -0.5)}]) == [1.0]
    assert gaps(None) == []


def test_two_gpus_are_watched_by_nobody():
    kept = compare({**FOUND, "watched": None, "tokens": ALONE["tokens"]}, ALONE, TIE)
    cells = "2 of 2 | yes | 1.75 | 0.50 0.25 | – | – | – | –"
    assert f"| tp | {cells} |" in correctness_table({"tp": kept})
    assert waits_text({"tp": kept}) == ""


def test_ranks_have_a_row_each_drafter():
    kept = compare({**FOUND, "watched": None, "tokens": ALONE["tokens"]}, ALONE, TIE)
    table = ranks_table({"pard": {**kept, "idle_batches": 22}})
    assert "| pard | 2 of 2 | yes | 1.75 | 0.50 0.25 | 22 |" in table
    assert ranks_table({}) == ""


def test_waits_are_told_with_their_place():
    kept = compare({**FOUND, "tokens": ALONE["tokens"]}, ALONE, TIE)
    text = waits_text({"graphs": kept})
    assert "of 4 steps 1 made the host wait" in text
    assert "at `vllm/v1/x.py:7`" in text


class Speculator:
    """One pass a step: a piecewise graph of two parts, then FULL ones, then none."""

    device = SimpleNamespace(type="cpu")

    def __init__(self):
        self.graphs, self.calls = self, 0

    def propose(self, num_speculative_tokens=None):
        self.calls += 1
        if self.calls == 1:
            self.run_pw_graph()
        elif self.calls < 4:
            self.run_fullgraph()
        return "drafts"

    def run_pw_graph(self):
        torch.cuda.CUDAGraph.replay(None)
        torch.cuda.CUDAGraph.replay(None)

    def run_fullgraph(self):
        torch.cuda.CUDAGraph.replay(None)


def test_what_stood_for_draft_passes(monkeypatch):
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda graph: None)
    speculator = Speculator()
    watch = DraftWatch(speculator)
    for length in (7, 7, 3, 0):
        assert speculator.propose(num_speculative_tokens=length) == "drafts"
    found = watch.describe()
    assert found["steps"] == {"piecewise": 1, "full": 2, "eager": 1}
    assert found["graphs_replayed"] == {"piecewise": 2, "full": 2}
    assert found["drafted"] == {7: 2, 3: 1, 0: 1}
    assert found["waiting_steps"] is None


def test_a_wait_is_noted_and_made_up_for(monkeypatch):
    modes: list[str] = []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)

    def waits():
        if modes[-1] == "error":
            raise RuntimeError(draft_watch.WAIT)
        return 5

    found, place = draft_watch.call_without_waits(waits, is_cuda=True)
    assert found == 5 and place.startswith("test_correctness.py:")
    assert modes == ["error", "default"]

    def fails():
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        draft_watch.call_without_waits(fails, is_cuda=True)
    assert modes[-1] == "default"


def test_waits_that_go_unnoticed_are_an_error(monkeypatch):
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda mode: None)
    number = SimpleNamespace(item=lambda: 1.0)
    monkeypatch.setattr(torch, "ones", lambda *_, **__: number)
    with pytest.raises(RuntimeError, match="does not notice"):
        draft_watch.check_that_waits_are_noticed()


def test_schedule_has_every_length():
    lengths = build_dynamic_sd_schedule_lookup(schedule(7), MAX_NUM_SEQS, 7)
    assert Counter(lengths[1:]) == {7: 4, 3: 4, 0: 8}


@pytest.mark.parametrize("mode", ["draft", "pard", "pard2"])
def test_a_head_of_zeros_changes_nothing(mode: str, tmp_path: Path):
    from transformers import AutoModelForCausalLM

    even = with_even_heads(BUNDLED / mode, tmp_path)
    heads = json.loads((even / "config.json").read_text())
    assert heads["num_attention_heads"] % 2 == 0
    if mode == "draft":
        assert even == BUNDLED / mode  # has an even number already
        return
    ids = torch.arange(40)[None] + 100
    own, padded = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)(ids).logits
        for path in (BUNDLED / mode, even)
    )
    torch.testing.assert_close(own, padded, atol=1e-4, rtol=1e-4)


def test_only_two_ranks_get_even_heads(monkeypatch):
    """From the process that engines are started by: theirs may run no PyTorch yet."""

    def run_jobs(program, jobs, device, at_once):
        return {
            name: Path(job["speculative_config"]["model"], "config.json").read_text()
            for name, job in jobs.items()
            if job["speculative_config"]
        }

    monkeypatch.setattr(correctness, "run_jobs", run_jobs)
    args = Namespace(
        modes=["pard"],
        how=["graphs", "tensor-parallel", "local-argmax"],
        dtype="float32",
        device="cpu",
        num_speculative_tokens=7,
        output_len=4,
        engines_at_once=1,
    )
    heads = {
        name: json.loads(config)["num_attention_heads"]
        for name, config in run_all(args, []).items()
    }
    assert heads == {
        "pard-graphs": 3,
        "pard-tensor-parallel": 4,
        "pard-local-argmax": 4,
    }


def test_heads_that_cannot_just_be_added(tmp_path: Path):
    config = {"num_attention_heads": 3, "num_key_value_heads": 3}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="do not share one KV head"):
        with_even_heads(tmp_path, tmp_path)


def measured(rates: list[float], prompts: str = "a", **more) -> dict:
    engine = {
        "run": "r",
        "drafts": 100,
        "acceptance_by_position": rates,
        **more,
    }
    run = {"prompts": prompts, "output_len": 100}
    return {"runs": {"r": run}, "engines": {"pard-eager": engine}}


def test_devices_side_by_side():
    cpu = measured([0.5, 0.2])
    assert "| 0.500 0.200 | 0.500 0.200 | +0.0 +0.0 | yes |" in drift_table(
        measured([0.5, 0.2]), cpu
    )
    assert "| +6.9 +0.0 | **no** |" in drift_table(measured([0.9, 0.2]), cpu)
    assert drift_table(measured([0.5, 0.2], prompts="b"), cpu) == ""
    assert drift_table(measured([0.5, 0.2], drafted={"2": 1, "1": 1}), cpu) == ""
    assert drift_table(measured([0.5, 0.2], drafted={"1": 1}), cpu) == ""
    assert drift_table(measured([0.5, 0.2], drafted={"2": 1}), cpu) != ""


def test_a_run_ends_with_what_is_wrong(monkeypatch):
    monkeypatch.setattr(correctness.files, "load", lambda path: measured([0.5, 0.2]))
    judge(measured([0.5, 0.2], are_ties=True))
    with pytest.raises(SystemExit, match="not the target's: pard-eager"):
        judge(measured([0.5, 0.2], are_ties=False))
    with pytest.raises(SystemExit, match="not that of the CPU: pard-eager"):
        judge(measured([0.9, 0.2], are_ties=True))
