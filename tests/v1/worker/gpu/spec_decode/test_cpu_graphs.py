# SPDX-License-Identifier: Apache-2.0
"""Which draft passes are recorded on a CPU, and when."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadata
from vllm.v1.worker.gpu.spec_decode.unified import cpu_graphs
from vllm.v1.worker.gpu.spec_decode.unified.cpu_graphs import (
    MOST_ROWS,
    CPUGraphs,
    padded,
    sizes_to_record,
)

PRIMITIVES = 32  # that vLLM keeps for the linear layers of a shape, by number of rows


class Model:
    """Adds the sequence length to its input, as attention does: to all rows that it is
    told of, and leaves what was in memory in rows without a request."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, hidden_states: torch.Tensor, inputs_embeds=None) -> torch.Tensor:
        self.calls += 1
        metadata = cpu_graphs.get_forward_context().attn_metadata["layers.1"]
        rows = metadata.num_actual_tokens
        assert rows == len(hidden_states)
        own = torch.arange(rows) < metadata.query_start_loc.max()
        found = hidden_states + metadata.seq_lens.sum()
        return torch.where(own[:, None], found, hidden_states.new_empty(rows, 4))


class Reader(Model):
    def __call__(self, hidden_states: torch.Tensor, inputs_embeds=None) -> torch.Tensor:
        hidden_states.sum().item()
        return super().__call__(hidden_states)


class OtherMetadata(CPUAttentionMetadata):
    pass


def metadata(rows: int, length: int, kind: Any) -> CPUAttentionMetadata:
    return kind(
        num_actual_tokens=rows,
        max_query_len=rows,
        query_start_loc=torch.tensor([0, rows]),
        max_seq_len=length,
        seq_lens=torch.tensor([length]),
        block_table=torch.zeros(1, 1, dtype=torch.int32),
        slot_mapping=torch.arange(rows),
        scheduler_metadata=torch.zeros(8),
    )


@pytest.fixture
def run(monkeypatch):
    """Runs a pass of as many rows, and checks what it returns."""
    model, graphs = Model(), CPUGraphs()

    def run(
        rows: int,
        length: int = 1,
        kind: Any = CPUAttentionMetadata,
        padding: int = 0,
        **fields: Any,
    ) -> int:
        """Returns how often the model ran."""
        one = replace(metadata(rows, length, kind), **fields)
        context = SimpleNamespace(
            attn_metadata=dict.fromkeys(("layers.0", "layers.1"), one),
            slot_mapping=dict.fromkeys(("layers.0", "layers.1"), one.slot_mapping),
        )
        monkeypatch.setattr(cpu_graphs, "get_forward_context", lambda: context)
        before, states = model.calls, torch.randn(rows + padding, 4)
        inputs = {"hidden_states": states, "inputs_embeds": None}
        found = graphs.run(model, inputs, len(states))
        assert torch.equal(found[:rows], states[:rows] + length)
        return model.calls - before

    run.graphs, run.model = graphs, model
    with torch.inference_mode():
        yield run


def test_recorded_and_verified(run):
    """From the third pass on the model does not run."""
    assert [run(3, length) for length in range(1, 6)] == [1, 1, 0, 0, 0]
    # Each number of rows has a recording of its own.
    assert [run(2, length) for length in range(1, 4)] == [1, 1, 0]
    assert run(3, 9) == 0


@pytest.mark.parametrize(
    "given",
    [
        {"rows": MOST_ROWS + 1},
        {"rows": 2, "kind": OtherMetadata},
        {"rows": 2, "draft_tree": object()},
    ],
    ids=["many rows", "other attention", "tree"],
)
def test_not_recorded(run, given):
    assert [run(**given) for _ in range(5)] == [1] * 5


def test_verified_on_other_inputs_than_the_recorded_ones(run, monkeypatch):
    states = torch.randn(3, 4)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "randn", lambda *_: states.clone())
        assert [run(3) for _ in range(5)] == [1] * 5
    assert [run(3), run(3)] == [1, 0]


def test_padding_may_differ(run):
    """What covers one number of rows covers those that are padded to it."""
    assert [run(rows, padding=8 - rows) for rows in range(5, 9)] == [1, 1, 0, 0]
    assert len(run.graphs.by_key) == 1


def test_causal_passes_are_others(run):
    """What is no tensor does not change in a recording."""
    for _ in range(3):
        run(3)
    assert run(3, causal=False) == 1
    assert run(3) == 0


def test_a_refusal_is_logged_once(run, caplog_vllm):
    """For all numbers of rows, since they run the same model."""
    run.model.__class__ = Reader
    for rows in (3, 3, 2, 2):
        assert run(rows) == 1
    (line,) = caplog_vllm.text.strip().splitlines()
    assert "not recorded" in line
    assert "depends on the contents of tensors" in line


def test_padded_sizes():
    """Few, so that layers can keep what they need for all of them, and close."""
    sizes = sizes_to_record(MOST_ROWS)
    assert len(sizes) <= PRIMITIVES and sizes[-1] == MOST_ROWS
    for rows in range(1, MOST_ROWS + 1):
        size = padded(rows)
        assert size == min(one for one in sizes if one >= rows)
        assert size - rows <= rows / 4
    assert padded(MOST_ROWS + 1) == MOST_ROWS + 1


@pytest.mark.parametrize("most", [1, 7, 10, 37, MOST_ROWS, 1000])
def test_recorded_before_the_first_request(run, most: int):
    run.graphs.record_sizes(most, run)
    calls = run.model.calls
    assert calls == len(run.graphs.by_key) == len(sizes_to_record(most))
    assert max(sizes_to_record(most)) == min(most, MOST_ROWS)
    # Whatever has room is padded to one of them.
    for rows in range(1, min(most, MOST_ROWS) + 1):
        assert min(padded(rows), most) in sizes_to_record(most)
    # A request verifies them.
    assert [run(1, 5), run(1, 6)] == [1, 0]


def test_recording_before_the_first_request_takes_little_time(run, monkeypatch):
    monkeypatch.setattr(cpu_graphs, "START_SECONDS", -1)
    run.graphs.record_sizes(MOST_ROWS, run)
    assert run.model.calls == 1


def test_nothing_is_recorded_for_other_attention(run, caplog_vllm):
    """One dummy pass finds out."""
    run.graphs.record_sizes(MOST_ROWS, lambda rows: run(rows, kind=OtherMetadata))
    assert run.model.calls == 1
    assert not run.graphs.by_key and not caplog_vllm.text


def test_recording_ends_with_a_refusal(run, caplog_vllm):
    run.model.__class__ = Reader
    run.graphs.record_sizes(MOST_ROWS, run)
    assert run.model.calls == 1
    assert len(caplog_vllm.text.strip().splitlines()) == 1
