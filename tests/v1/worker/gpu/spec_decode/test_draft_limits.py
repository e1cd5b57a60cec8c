# SPDX-License-Identifier: Apache-2.0
"""No batch that can be scheduled exceeds what the drafter was built for."""

from dataclasses import dataclass

import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.v1.worker.gpu.spec_decode.test_draft_config import engine_config
from vllm.v1.worker.gpu.spec_decode.unified.buffers import DraftBuffers
from vllm.v1.worker.gpu.spec_decode.unified.draft_config import widened_config
from vllm.v1.worker.gpu.spec_decode.unified.layout import DraftLayout


@dataclass
class Engine:
    layout: DraftLayout
    max_num_seqs: int
    budget: int  # max_num_batched_tokens, at least one for each request

    @property
    def widest(self) -> int:
        return self.layout.max_num_tokens(self.budget, self.max_num_seqs)

    def pass_tokens(self, query_lens: list[int]) -> list[int]:
        """Slots of each pass, counted by the table in `layout.py`."""
        layout, n = self.layout, len(query_lens)
        k, w, s = (
            layout.num_speculative_tokens,
            layout.parallel_width,
            layout.token_shift,
        )
        later = -(-k // w) - 1
        return [sum(query_lens) + n * (w - s)] + [n * (2 * w - 1)] * later


@st.composite
def engines(draw) -> Engine:
    k = draw(st.integers(1, 20))
    layout = DraftLayout(k, draw(st.integers(0, 1)), draw(st.integers(1, k)))
    max_num_seqs = draw(st.integers(1, 64))
    spare = draw(st.sampled_from([0, 1, 7, 512]))
    return Engine(layout, max_num_seqs, max_num_seqs + spare)


@st.composite
def batches(draw, engine: Engine) -> list[int]:
    """Query lengths of a step: at least 1 each, at most the budget together."""
    n = draw(st.integers(1, engine.max_num_seqs))
    left, query_lens = engine.budget - n, []
    for _ in range(n):
        query_lens.append(1 + draw(st.integers(0, left)))
        left -= query_lens[-1] - 1
    return query_lens


@given(engines(), st.data())
def test_every_batch_fits(engine: Engine, data: st.DataObject):
    query_lens = data.draw(batches(engine))
    assert max(engine.pass_tokens(query_lens)) <= engine.widest


@given(engines())
def test_the_widest_batch_can_be_scheduled(engine: Engine):
    rest = engine.budget - engine.max_num_seqs
    full = [1 + rest] + [1] * (engine.max_num_seqs - 1)
    assert max(engine.pass_tokens(full)) == engine.widest


@given(engines())
def test_compile_range_and_buffers_reach_the_widest_batch(engine: Engine):
    config = engine_config([engine.budget])
    config.scheduler_config.max_num_batched_tokens = engine.budget
    config.scheduler_config.max_num_seqs = engine.max_num_seqs
    draft = widened_config(config, engine.layout)
    assert draft.compilation_config.compile_ranges_endpoints == [engine.widest]
    assert draft.scheduler_config.max_num_batched_tokens == engine.widest

    buffers = DraftBuffers(
        engine.layout,
        engine.budget,
        engine.max_num_seqs,
        torch.device("cpu"),
        hidden_size=2,
        dtype=torch.float32,
    )
    buffers.allocate_kv_groups(2)
    assert buffers.batch.max_num_tokens == engine.widest
    for rows in (buffers.batch.input_ids, buffers.batch.positions):
        assert len(rows) == engine.widest
    assert len(buffers.fed_rows(torch.zeros(6))) == engine.widest
    assert buffers.batch.slot_mappings.shape == (2, engine.widest)
    assert len(buffers.batch.query_start_loc) == engine.max_num_seqs + 1
    samples = engine.max_num_seqs * engine.layout.parallel_width
    for rows in (buffers.batch.sample_rows, buffers.batch.sample_positions):
        assert len(rows) == samples
    if engine.layout.num_passes > 1:
        assert len(buffers.feedback) == samples
        later = engine.max_num_seqs * engine.layout.num_follow_slots
        assert len(buffers.own_rows) == later
