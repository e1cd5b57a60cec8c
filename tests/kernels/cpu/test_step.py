# SPDX-License-Identifier: Apache-2.0
"""Kernels of a Model Runner V2 step, on random batches, against the interpreter."""

import os

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vllm.v1.worker.gpu import input_batch
from vllm.v1.worker.gpu.block_table import BlockTables
from vllm.v1.worker.gpu.sample.gumbel import apply_temperature, gumbel_sample
from vllm.v1.worker.gpu.sample.min_p import apply_min_p
from vllm.v1.worker.gpu.sample.thinking_budget import apply_thinking_budget
from vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils import rejection_sample

from .twice import Twice

STATES, LENGTH, VOCABULARY, K = 6, 64, 1500, 3
EXAMPLES = int(os.environ.get("VLLM_TEST_EXAMPLES", 100)) // 20
SLOW = dict(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


class Batch:
    """Random requests: prefilling, decoding or with drafts, in random state slots."""

    def __init__(self, lengths: list[int], drafts: list[int], seed: int) -> None:
        self.chance = torch.Generator().manual_seed(seed)
        self.num_reqs = len(lengths)
        self.idx = torch.randperm(STATES, generator=self.chance)[: self.num_reqs].int()
        self.starts = cumulated(lengths)
        self.cu_num_logits = cumulated([1 + n for n in drafts])
        self.num_logits = int(self.cu_num_logits[-1])
        self.computed = self.integers(0, 30, STATES)
        self.prefill = self.integers(1, 40, STATES)
        self.seq_lens = torch.zeros(STATES, dtype=torch.int32)
        self.positions = torch.zeros(LENGTH, dtype=torch.int64)
        counts = torch.tensor(drafts) + 1
        self.rows = torch.repeat_interleave(self.idx, counts)
        at = [torch.arange(n) for n in counts.tolist()]
        self.depths = torch.cat(at).int()

    def integers(self, low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=self.chance, dtype=torch.int32)

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.chance)


def cumulated(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


@st.composite
def batches(draw) -> Batch:
    drafts = draw(st.lists(st.integers(0, K), min_size=1, max_size=STATES))
    lengths = [draw(st.integers(1, 6)) + n for n in drafts]
    return Batch(lengths, drafts, draw(st.integers(0, 2**31)))


@settings(**SLOW)
@given(batches())
def test_inputs(twice: Twice, b: Batch):
    input_ids = torch.zeros(LENGTH, dtype=torch.int32)
    tokens = b.integers(0, 99, STATES, 2 * LENGTH)
    ahead = torch.zeros(2, STATES, dtype=torch.int32)
    input_batch.prepare_prefill_inputs(
        input_ids, ahead, b.idx, b.starts, tokens, b.prefill, b.computed
    )
    input_batch.prepare_pos_seq_lens(
        b.idx, b.starts, b.computed, b.positions, b.seq_lens
    )
    last, drafts = b.integers(0, 99, STATES, 1), b.integers(0, 99, STATES, K)
    input_batch.combine_sampled_and_draft_tokens(
        input_ids, b.idx, last, b.starts, b.seq_lens, b.prefill, drafts,
        b.cu_num_logits, b.num_logits,
    )  # fmt: skip
    input_batch.get_num_sampled_and_rejected(
        b.integers(0, K + 2, b.num_reqs), b.seq_lens, b.cu_num_logits, b.idx, b.prefill
    )
    input_batch.expand_idx_mapping(b.idx, b.num_logits, b.cu_num_logits, K + 1)
    assert len(twice.names) >= 5


@settings(**SLOW)
@given(batches(), st.sampled_from([(16,), (4, 8)]))
def test_block_tables(b: Batch, sizes: tuple[int, ...]):
    """Kernels get the tables' addresses, so the contents are compared here."""
    tables = BlockTables(
        list(sizes), STATES + 1, LENGTH, [20] * len(sizes), torch.device("cpu")
    )
    for state in range(STATES):
        ids = tuple(b.integers(1, 500, 9 + state).tolist() for _ in sizes)
        tables.append_block_ids(state, ids, overwrite=True)
    tables.apply_staged_writes()
    input_batch.prepare_pos_seq_lens(
        b.idx, b.starts, b.computed, b.positions, b.seq_lens
    )
    gathered = tables.gather_block_tables(b.idx, b.num_reqs + 1)
    slots = tables.compute_slot_mappings(b.idx, b.starts, b.positions, LENGTH)
    for group, size in enumerate(sizes):
        table = tables.block_tables[group].gpu
        for req, state in enumerate(b.idx.tolist()):
            length = tables.num_blocks.np[group, state]
            assert torch.equal(gathered[group][req, :length], table[state, :length])
            own = slice(b.starts[req], b.starts[req + 1])
            at = b.positions[own]
            expected = table[state, at // size] * size + at % size
            assert torch.equal(slots[group, own], expected)
        assert (slots[group, b.starts[-1] :] == -1).all()
        assert not gathered[group][b.num_reqs].any()


@pytest.mark.parametrize("use_fp64", [False, True])
@settings(**SLOW)
@given(batches())
def test_sampling(twice: Twice, use_fp64: bool, b: Batch):
    logits = b.normal(b.num_logits, VOCABULARY) * 3
    temperature = torch.rand(STATES, generator=b.chance).round(decimals=1)
    seeds = b.integers(0, 2**30, STATES).long()
    positions = b.integers(0, 99, b.num_logits).long()
    apply_min_p(logits, b.rows, temperature / 9)
    gumbel_sample(
        logits, b.rows, temperature, seeds, positions,
        apply_temperature=True, is_drafting=False, use_fp64=use_fp64,
    )  # fmt: skip
    apply_temperature(logits, b.rows, temperature)
    assert len(twice.names) == 3


@settings(**SLOW)
@given(batches(), st.integers(1, 3), st.integers(1, 2))
def test_thinking_budget(twice: Twice, b: Batch, num_start: int, num_end: int):
    """Markers are frequent among the tokens, in histories and in drafts."""
    lengths = b.integers(1, LENGTH - K, STATES)
    apply_thinking_budget(
        b.normal(b.num_logits, VOCABULARY), b.idx, b.rows, b.integers(-1, 9, STATES),
        b.integers(0, 3, STATES, LENGTH), lengths, b.integers(0, 3, b.num_logits),
        b.depths, *torch.full((2, STATES), -1, dtype=torch.int32),
        torch.zeros(STATES, dtype=torch.int32), b.integers(0, 3, num_start),
        b.integers(0, 3, num_end), b.integers(0, 3, num_end + 1),
    )  # fmt: skip
    assert len(twice.names) == 2


@pytest.mark.parametrize("block", [False, True])
@pytest.mark.parametrize("has_logits", [False, True])
@settings(**SLOW)
@given(batches())
def test_verification(twice: Twice, has_logits: bool, block: bool, b: Batch):
    logits = b.normal(b.num_logits, VOCABULARY) * 3
    drafts = logits.argmax(-1).roll(1)
    draft_logits = b.normal(STATES, K, VOCABULARY) * 3 if has_logits else None
    temperature = torch.rand(STATES, generator=b.chance).round(decimals=1)
    _, num_sampled = rejection_sample(
        logits, draft_logits, drafts, b.cu_num_logits, torch.arange(b.num_logits),
        b.idx, b.rows, b.depths, temperature, torch.arange(STATES), K, None,
        use_fp64=False, use_block_verification=block,
    )  # fmt: skip
    assert (num_sampled >= 1).all()
