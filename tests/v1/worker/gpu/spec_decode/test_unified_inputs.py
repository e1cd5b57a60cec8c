# SPDX-License-Identifier: Apache-2.0
"""Compares the input kernel with its PyTorch reference."""

import copy
import inspect
import os
from dataclasses import dataclass
from unittest.mock import MagicMock

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vllm.v1.attention.backends.utils import PAD_SLOT_ID
from vllm.v1.worker.gpu.block_table import BlockTables
from vllm.v1.worker.gpu.spec_decode.unified import inputs
from vllm.v1.worker.gpu.spec_decode.unified.input_kernel import (
    HiddenRows,
    PreviousDrafts,
    VerifiedBatch,
)
from vllm.v1.worker.gpu.spec_decode.unified.inputs import DraftInputs, DraftLimits
from vllm.v1.worker.gpu.spec_decode.unified.layout import DraftLayout

from .batches import DEVICE, block_tables, int32, int64, plan_of, told, verified_batch
from .prepare_inputs_reference import prepare_inputs_reference

# Fewer if a tool such as compute-sanitizer makes the kernel slow.
EXAMPLES = int(os.environ.get("VLLM_TEST_EXAMPLES", 60))
MAX_TOKENS, MAX_MODEL_LEN, HIDDEN = 96, 64, 24
MASK = 999
BLOCK_SIZES = {1: [16], 2: [16, 4]}
NUM_BLOCKS = 30
# Never written by a step: if a guard has another value, a write was out of bounds.
POISON = -77
GUARD = 64  # elements of poison before and after each tensor of the buffers
# The first cases on a GPU include its initialization.
SLOW = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}


@dataclass
class Case:
    layout: DraftLayout
    batch: VerifiedBatch
    tables: BlockTables
    hidden: HiddenRows | None
    limits: DraftLimits
    query_lens: list[int]
    num_drafts: int
    num_padding: int  # padded rows after the batch, if the buffers have that many
    rope_dims: int


@st.composite
def layouts(draw) -> DraftLayout:
    k = draw(st.integers(1, 9))
    shift, width = draw(st.integers(0, 1)), draw(st.integers(1, k))
    return DraftLayout(k, shift, width, draw(st.sampled_from([1, 4])) ** (width == 1))


class Random:
    """Random tensors on the device, from a seed."""

    def __init__(self, seed: int) -> None:
        self.rng = torch.Generator().manual_seed(seed)

    def integer(self, low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (1,), generator=self.rng))

    def ints(self, *shape: int, low: int = 1, high: int = 900) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=self.rng).to(DEVICE)

    def hidden(self, layout: DraftLayout, num_rows: int, sources: int) -> HiddenRows:
        def rows(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=self.rng).to(DEVICE)

        blocks = () if layout.token_shift else (2 * NUM_BLOCKS,)
        fallback = rows(*blocks, sources * HIDDEN)
        return HiddenRows(
            tuple(rows(num_rows, HIDDEN) for _ in range(sources)), fallback
        )

    def tables(self, groups: int, max_num_reqs: int) -> BlockTables:
        sizes = BLOCK_SIZES[groups]
        width = [-(-MAX_MODEL_LEN // size) for size in sizes]
        tables = BlockTables(sizes, max_num_reqs, MAX_TOKENS, width, DEVICE)
        for group, table in enumerate(tables.block_tables):
            # Ids after a request's own blocks are stale; some of its own are null
            # blocks.
            table.gpu.copy_(self.ints(*table.gpu.shape, low=0, high=NUM_BLOCKS))
            held = self.ints(max_num_reqs, low=0, high=width[group] + 1)
            tables.num_blocks.np[group] = held.cpu()
        tables.num_blocks.copy_to_uva()
        return tables


@st.composite
def cases(draw) -> Case:
    layout, some = draw(layouts()), Random(draw(st.integers(0, 2**31)))
    # Padding up to 300 requests exceeds one block of the kernel.
    most, n = draw(st.sampled_from([5, 12, 300])), draw(st.integers(1, 5))
    pad = [0] * draw(st.integers(0, min(most - n, 8)))
    left, query_lens, starts = MAX_TOKENS, [], []
    for i in range(n):
        longest = min(left - (n - 1 - i), MAX_MODEL_LEN)
        near = draw(st.sampled_from(["decode", "any", "limit"]))
        if near == "decode":
            longest = min(longest, layout.num_speculative_tokens + 1)
        query_lens.append(some.integer(1, longest))
        room = MAX_MODEL_LEN - query_lens[-1]
        starts.append(room if near == "limit" else some.integer(0, room))
        left -= query_lens[-1]
    states = torch.randperm(most, generator=some.rng)[:n]
    dummies = draw(st.sampled_from(["none", "none", "some", "all"]))
    if dummies != "none":
        states[some.integer(0, n - 1) if dummies == "some" else slice(None)] = -1
    rejected = [some.integer(0, 1) * some.integer(0, q - 1) for q in query_lens]
    batch = verified_batch(
        query_lens + pad,
        starts + pad,
        most,
        input_ids=some.ints(sum(query_lens)).int(),
        idx_mapping=int64([*states.tolist(), *[-1] * len(pad)]),
        num_sampled=int32([some.integer(0, 1) for _ in query_lens] + pad),
        num_rejected=int32(rejected + pad),
        last_sampled=some.ints(most, 1),
        next_prefill_tokens=some.ints(most).int(),
        temperature=torch.rand(most, generator=some.rng).to(DEVICE),
        seeds=some.ints(most),
    )
    tables, hidden = some.tables(draw(st.sampled_from([1, 2])), most), None
    groups = len(tables.block_sizes)
    if sources := draw(st.sampled_from([1, 3] if layout.token_shift else [0, 1, 2])):
        hidden = some.hidden(layout, MAX_TOKENS, sources)
        # Kept states are of tokens before first ones of requests; -1: of none.
        before = int64([*starts, 0, 0]) - 1
        kept = before[some.ints(2 * NUM_BLOCKS, low=0, high=len(before))]
        if not layout.token_shift:
            hidden = hidden._replace(positions=kept, kv_group=groups - 1)
    # Each number of dimensions is another kernel to compile.
    if dims := 3 * (groups - 1):
        batch = batch._replace(
            rope_positions=some.ints(dims, MAX_TOKENS + 1),
            rope_deltas=some.ints(most, low=-9, high=9).int(),
        )
    limit = draw(st.sampled_from([MAX_MODEL_LEN, 20]))
    limits = DraftLimits(MASK, draw(st.sampled_from([500, 1000])), limit)
    num_drafts = draw(st.integers(0, layout.num_speculative_tokens))
    padding = draw(st.sampled_from([0, 3, 20, 600]))
    drafts = query_lens, num_drafts, padding
    return Case(layout, batch, tables, hidden, limits, *drafts, dims)


def make_buffers(case: Case) -> DraftInputs:
    layout, max_num_reqs = case.layout, case.tables.max_num_reqs
    size = HIDDEN if case.hidden is not None else None
    buffers = DraftInputs(
        layout, MAX_TOKENS, max_num_reqs, DEVICE, size, torch.float32, case.rope_dims
    )
    buffers.allocate_kv_groups(case.tables.num_kv_cache_groups)
    if case.hidden is not None:
        buffers.fed_rows(case.hidden.fallback)
    for name, tensor in tensors_of(buffers).items():
        if name in buffers.batch._fields:
            buffers.batch = buffers.batch._replace(**{name: poisoned(tensor)})
        else:
            setattr(buffers, name, poisoned(tensor))
    return told(buffers, case.tables, case.limits)


def poisoned(like: torch.Tensor) -> torch.Tensor:
    """A tensor full of poison, with guards of poison around it in memory."""
    around = like.new_full((like.numel() + 2 * GUARD,), POISON)
    return around[GUARD:-GUARD].view(like.shape)


def with_guards(tensor: torch.Tensor) -> torch.Tensor:
    whole = tensor.new_empty(0).set_(tensor.untyped_storage())
    assert whole.numel() == tensor.numel() + 2 * GUARD
    return whole


def tensors_of(buffers: DraftInputs) -> dict[str, torch.Tensor]:
    found = buffers.batch._asdict() | vars(buffers)
    return {n: value for n, value in found.items() if isinstance(value, torch.Tensor)}


def assert_same(actual: DraftInputs, expected: DraftInputs) -> None:
    for name, tensor in tensors_of(expected).items():
        torch.testing.assert_close(
            with_guards(tensors_of(actual)[name]),
            with_guards(tensor),
            rtol=0,
            atol=0,
            msg=lambda m, n=name: f"{n}: {m}",
        )


def run_passes(prepare, case: Case) -> list[DraftInputs]:
    """The draft batch after each pass, with random drafts between passes."""
    layout, batch = case.layout, case.batch
    buffers = make_buffers(case)
    num_reqs = batch.idx_mapping.shape[0]
    total = sum(case.query_lens) + layout.num_extra_slots * len(case.query_lens)
    some = Random(1)
    drafts = some.ints(num_reqs, layout.num_speculative_tokens)
    after, most = [], buffers.batch.max_num_tokens
    # Without drafts there is still a first pass, which writes KV.
    for draft_pass in range(max(-(-case.num_drafts // layout.parallel_width), 1)):
        source, hidden, rows = batch, case.hidden, total
        if draft_pass:
            source, samples_before = PreviousDrafts(drafts), 1
            if (beams := layout.num_beams) > 1:
                samples_before = beams ** (draft_pass > 1)
                parents = some.ints(num_reqs, beams, low=0, high=samples_before).int()
                source = PreviousDrafts(some.ints(num_reqs, beams), parents)
            if hidden is not None:
                rows_fed = num_reqs * layout.parallel_width * samples_before
                hidden = some.hidden(layout, rows_fed, 1)
            rows = layout.num_follow_slots * len(case.query_lens)
        plan = plan_of(layout, case.num_drafts)
        rows = min(rows + case.num_padding, most)
        prepare(buffers, source, plan, draft_pass, rows, hidden)
        shared = {id(buffers.tables): buffers.tables}
        after.append(copy.deepcopy(buffers, shared))
    return after


@settings(max_examples=EXAMPLES, **SLOW)
@given(cases())
def test_kernel_equals_reference(case: Case):
    actual = run_passes(DraftInputs.prepare, case)
    expected = run_passes(prepare_inputs_reference, case)
    for got, wanted in zip(actual, expected, strict=True):
        assert_same(got, wanted)
        assert_only_owned_slots_are_written(got, case)


def assert_only_owned_slots_are_written(buffers: DraftInputs, case: Case) -> None:
    """KV safety of every pass, checked independently of the reference."""
    tables = case.tables
    for req, state in enumerate(case.batch.idx_mapping.tolist()):
        begin, end = buffers.batch.query_start_loc[req : req + 2].tolist()
        for group, size in enumerate(tables.block_sizes):
            slots = buffers.batch.slot_mappings[group, begin:end]
            used = slots[slots != PAD_SLOT_ID]
            if state < 0:
                assert used.numel() == 0
                continue
            held = int(tables.num_blocks.gpu[group, state])
            owned = tables.block_tables[group].gpu[state, :held]
            assert set((used // size).tolist()) <= set(owned.tolist()) - {0}
            at = buffers.batch.positions[begin:end][slots != PAD_SLOT_ID]
            assert bool((at < case.limits.max_len).all())
            if case.layout.num_beams == 1:
                assert torch.equal(used % size, at % size)
                assert at.unique().numel() == at.numel()


LIMITS = DraftLimits(MASK, 1 << 30, 64)


@pytest.mark.parametrize("width", [1, 3])
def test_captured_batch_owns_no_blocks(width: int):
    """Dummy requests of a graph, with block counts left over from earlier steps."""
    layout = DraftLayout(7, 0, width)
    buffers = DraftInputs(layout, 64, 4, DEVICE)
    buffers.allocate_kv_groups(1)
    slots = layout.num_follow_slots
    buffers.lay_out_evenly(3, 3 * slots)
    buffers.batch.num_blocks.fill_(4)
    source = PreviousDrafts(int64([[1] * 7] * 3))
    told(buffers, block_tables([9] * 4, 4), LIMITS)
    buffers.prepare(source, plan_of(layout), 1, 3 * slots, None)
    found = buffers.batch
    assert found.query_start_loc.tolist() == [0, slots, 2 * slots, *[3 * slots] * 2]
    assert bool((found.slot_mappings == PAD_SLOT_ID).all())
    assert found.sample_requests.tolist() == [-1] * 4 * width


@pytest.mark.parametrize("is_fed", [False, True])
@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("width", [1, 4, 7])
def test_all_lengths_run_the_same_compiled_kernel(
    monkeypatch, width: int, shift: int, is_fed: bool
):
    """Otherwise the first step with a new length would compile while serving."""
    kernel = inspect.signature(inputs.prepare_inputs_kernel.fn).parameters.items()
    names = [name for name, of in kernel if "constexpr" in str(of.annotation)]
    constants, launch = [], MagicMock()
    launch.__getitem__.return_value = lambda *_, **given: constants.append(
        [given[name] for name in names]
    )
    monkeypatch.setattr(inputs, "prepare_inputs_kernel", launch)
    widest, query_lens, size = DraftLayout(7, shift, width), [8, 3, 1], 3
    own = HIDDEN if is_fed else None
    buffers = DraftInputs(widest, 64, size, DEVICE, own, torch.float32)
    buffers.allocate_kv_groups(1)
    told(buffers, block_tables([0], size), LIMITS)
    first = verified_batch(query_lens, [0] * size)
    later = PreviousDrafts(int64([[0] * 7] * size))
    for draft_pass, lengths in ((0, range(8)), (1, range(width + 1, 8))):
        constants.clear()
        for num_drafts in lengths:
            layout, hidden = widest.for_drafts(num_drafts), None
            if is_fed:
                states = size * layout.parallel_width if draft_pass else sum(query_lens)
                hidden = Random(0).hidden(layout, states, 1)
                hidden = hidden._replace(positions=int64([0] * 2 * NUM_BLOCKS))
            rows = layout.max_num_tokens(sum(query_lens), size)
            plan, source = plan_of(layout, num_drafts), later if draft_pass else first
            buffers.prepare(source, plan, draft_pass, rows, hidden)
        assert all(found == constants[0] for found in constants)
