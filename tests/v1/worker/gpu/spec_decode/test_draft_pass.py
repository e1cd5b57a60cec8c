# SPDX-License-Identifier: Apache-2.0
"""Sizes that a draft pass gives to attention metadata and EPLB."""

import itertools
from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from vllm.v1.worker.gpu.spec_decode import speculator as base
from vllm.v1.worker.gpu.spec_decode.unified import passes, speculator
from vllm.v1.worker.gpu.spec_decode.unified.buffers import DraftBuffers
from vllm.v1.worker.gpu.spec_decode.unified.layout import DraftLayout
from vllm.v1.worker.gpu.spec_decode.unified.plan import draft_plans
from vllm.v1.worker.gpu.spec_decode.unified.shapes import DraftShape, StepShapes
from vllm.v1.worker.gpu.spec_decode.unified.speculator import UnifiedSpeculator

MAX_MODEL_LEN, QUERY = 64, 8


class Told:
    """Records the sizes that a pass gives to vLLM's speculator."""

    def __init__(self, monkeypatch, width: int) -> None:
        self.metadata: list[dict] = []
        self.eplb: list[int] = []
        self.speculator = made = UnifiedSpeculator.__new__(UnifiedSpeculator)
        self.layout = made.layout = DraftLayout(7, 0, width)
        made.drafter = SimpleNamespace(set_kv_cache=lambda *_: None)
        made.draft_window = None
        made.max_num_reqs, made.device = 4, torch.device("cpu")
        made.vllm_config = SimpleNamespace(
            model_config=SimpleNamespace(max_model_len=MAX_MODEL_LEN)
        )
        made.graphs, made.kv_cache_config, made.attn_groups = None, None, [[None]]
        made.dcp_size = 1
        made.draft_is_prefilling = torch.zeros(4, dtype=torch.bool)
        made.buffers = DraftBuffers(made.layout, 64, 4, made.device)
        made.run_pass = lambda *_: None
        made._prepare_eplb_forward = self.eplb.append
        self.plan = draft_plans(made.layout, {7: 7}, 4, made.device)[7]
        tables = SimpleNamespace(num_kv_cache_groups=1)
        view = SimpleNamespace(input_block_tables=[])
        monkeypatch.setattr(base.DraftModelSpeculator, "set_attn", lambda *_: None)
        monkeypatch.setattr(speculator, "DraftBlockTables", lambda *_: view)
        monkeypatch.setattr(passes, "build_slot_mappings_by_layer", lambda *_: {})
        monkeypatch.setattr(
            base, "build_attn_metadata", lambda **given: self.metadata.append(given)
        )
        made.set_attn(None, None, tables)

    def run(self, draft_pass: int, sync: SimpleNamespace | None = None) -> DraftShape:
        """Runs a pass for one request whose query ends at max_model_len."""
        shapes, batch = StepShapes(None, 0, sync, True, QUERY), one_request()
        first = shapes.first(batch, self.plan)
        shape = shapes.later(1, self.plan) if draft_pass else first
        self.speculator._run(self.plan, draft_pass, batch, shape)
        return shape

    def run_later(self, updates: bool) -> list[tuple]:
        """Runs all later passes; returns what happens in which order.

        Args:
            updates: whether attention backends update metadata in place.
        """
        made, done = self.speculator, []
        made.supports_decode_metadata_update = updates
        made.prepare_later = lambda plan, draft_pass, *_: done.append(
            ("prepare", draft_pass)
        )
        made._update_draft_decode_metadata = lambda *_: done.append(("update",))

        def run(plan, draft_pass: int, context) -> None:
            done.append(("run", draft_pass))
            self.read = context.attn_metadata

        made.run_pass = made._run_and_sample = run
        made.entered = lambda _: nullcontext()
        if updates:
            names = ["layer", "other"]
            group = SimpleNamespace(layer_names=names, kv_cache_group_id=0)
            made.attn_groups = [[group]]
        first = dict.fromkeys(["layer", "other"], Metadata(QUERY + 7, QUERY + 7))
        shape = StepShapes(None, 0, None, True, QUERY).later(1, self.plan)
        made._run_later(self.plan, one_request(), shape, first)
        return done


@dataclass
class Metadata:
    """What differs between the first pass and the later ones, and what does not."""

    num_actual_tokens: int
    max_query_len: int
    slot_mapping: torch.Tensor | None = None
    kept: str = "kept"


def one_request() -> SimpleNamespace:
    return SimpleNamespace(
        num_reqs=1,
        num_tokens=QUERY,
        num_scheduled_tokens=np.array([QUERY]),
        decode_graph_eligible=False,
        num_draft_tokens_per_req=None,
        query_start_loc_np=np.array([0, QUERY], dtype=np.int32),
        seq_lens_cpu_upper_bound=torch.tensor([MAX_MODEL_LEN], dtype=torch.int32),
    )


@pytest.mark.parametrize("width", [1, 4, 7])
def test_host_has_upper_bounds_of_sequence_lengths(monkeypatch, width: int):
    """Also near max_model_len, where padding slots extend past it."""
    told = Told(monkeypatch, width)
    for draft_pass in range(told.layout.num_passes):
        told.run(draft_pass)
        # As the input kernel computes them if nothing is rejected.
        longest = MAX_MODEL_LEN + told.layout.num_extra_slots
        if draft_pass:
            start = MAX_MODEL_LEN + 1 + (draft_pass - 1) * width
            longest = start + told.layout.num_follow_slots
        given = told.metadata[-1]
        assert given["seq_lens_cpu_upper_bound"].tolist() >= [longest]
        assert given["max_seq_len"] >= longest


def test_eplb_counts_only_real_tokens(monkeypatch):
    told = Told(monkeypatch, 7)
    sync = SimpleNamespace(
        num_tokens_across_dp=torch.tensor([20, 20]),
        num_reqs=2,
        uniform_token_count=None,
        eager=True,
    )
    real = QUERY + told.layout.num_extra_slots
    assert told.run(0, sync).num_tokens > real  # padded for the other rank
    assert told.eplb == [real]


def test_metadata_is_built_for_each_later_pass(monkeypatch):
    told = Told(monkeypatch, 2)
    steps = [("prepare", 1), ("run", 1), ("prepare", 2), ("run", 2)]
    assert told.run_later(updates=False)[:4] == steps
    assert len(told.metadata) == told.layout.num_passes - 1


def test_metadata_of_the_first_pass_is_updated(monkeypatch):
    """Once the inputs of a pass, which it refers to, are prepared."""
    told = Told(monkeypatch, 2)
    passes = range(1, told.layout.num_passes)
    wanted = [(("prepare", n), ("update",), ("run", n)) for n in passes]
    assert told.run_later(updates=True) == [*itertools.chain(*wanted)]
    assert not told.metadata  # none is built
    rows, found = told.layout.num_follow_slots, told.read["layer"]
    assert told.read["other"] is found
    assert (found.num_actual_tokens, found.max_query_len) == (rows, rows)
    slots = told.speculator.buffers.batch.slot_mappings
    assert found.slot_mapping.data_ptr() == slots.data_ptr()
    assert (len(found.slot_mapping), found.kept) == (rows, "kept")
