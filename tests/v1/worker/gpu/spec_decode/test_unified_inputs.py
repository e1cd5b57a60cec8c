# SPDX-License-Identifier: Apache-2.0
"""Compares the input kernel with its PyTorch reference."""

import copy
import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vllm.v1.attention.backends.utils import PAD_SLOT_ID
from vllm.v1.worker.gpu.block_table import BlockTables
from vllm.v1.worker.gpu.spec_decode.unified import input_kernel
from vllm.v1.worker.gpu.spec_decode.unified.input_kernel import VerifiedBatch
from vllm.v1.worker.gpu.spec_decode.unified.inputs import (
    DraftInputs,
    HiddenRows,
    PreviousPass,
)
from vllm.v1.worker.gpu.spec_decode.unified.layout import DraftLayout

from .batches import (
    DEVICE,
    SAMPLED,
    block_tables,
    int32,
    int64,
    prepare_inputs,
    verified_batch,
)
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
    limit: int
    query_lens: list[int]
    num_drafts: int
    num_padding: int  # padded rows after the batch, if the buffers have that many
    rope_dims: int
    vocab_size: int


@st.composite
def layouts(draw) -> DraftLayout:
    k = draw(st.integers(1, 9))
    shift, width = draw(st.integers(0, 1)), draw(st.integers(1, k))
    return DraftLayout(k, shift, width, draw(st.sampled_from([1, 4])) ** (width == 1))


@st.composite
def cases(draw) -> Case:
    layout = draw(layouts())
    # Padding up to 300 requests exceeds one block of the kernel.
    max_num_reqs = draw(st.sampled_from([5, 12, 300]))
    num_reqs = draw(st.integers(1, 5))
    num_padded = draw(st.integers(0, min(max_num_reqs - num_reqs, 8)))
    seed = draw(st.integers(0, 2**31))
    rng = torch.Generator().manual_seed(seed)

    def integer(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (1,), generator=rng))

    left, query_lens, starts = MAX_TOKENS, [], []
    for i in range(num_reqs):
        most = min(left - (num_reqs - 1 - i), MAX_MODEL_LEN)
        near = draw(st.sampled_from(["decode", "any", "limit"]))
        q = integer(
            1,
            min(most, layout.num_speculative_tokens + 1 if near == "decode" else most),
        )
        room = MAX_MODEL_LEN - q
        starts.append(room if near == "limit" else integer(0, room))
        query_lens.append(q)
        left -= q
    tables = make_tables(rng, draw(st.sampled_from([1, 2])), max_num_reqs)
    states = torch.randperm(max_num_reqs, generator=rng)[:num_reqs]
    dummies = draw(st.sampled_from(["none", "none", "some", "all"]))
    if dummies != "none":
        states[integer(0, num_reqs - 1) if dummies == "some" else slice(None)] = -1
    batch = make_batch(
        rng, query_lens, starts, states, num_padded, max_num_reqs, integer
    )
    hidden = None
    num_sources = draw(st.sampled_from([1, 3] if layout.token_shift else [0, 1, 2]))
    if num_sources:
        groups = len(tables.block_sizes)
        hidden = make_hidden(rng, layout, MAX_TOKENS, num_sources)
        if layout.token_shift == 0:
            hidden = hidden._replace(
                positions=kept_positions(rng, starts), kv_group=groups - 1
            )
    limit = draw(st.sampled_from([MAX_MODEL_LEN, 20]))
    num_drafts = draw(st.integers(0, layout.num_speculative_tokens))
    padding = draw(st.sampled_from([0, 3, 20, 600]))
    # Each number of dimensions is another kernel to compile.
    dims = 3 * (len(tables.block_sizes) - 1)
    if dims:
        batch = with_rope_positions(rng, batch, dims, max_num_reqs)
    drafts = query_lens, num_drafts, padding
    vocab_size = draw(st.sampled_from([500, 1000]))
    return Case(layout, batch, tables, hidden, limit, *drafts, dims, vocab_size)


def with_rope_positions(
    rng, batch: VerifiedBatch, dims: int, max_num_reqs: int
) -> VerifiedBatch:
    positions = torch.randint(0, 99, (dims, MAX_TOKENS + 1), generator=rng)
    deltas = torch.randint(-9, 9, (max_num_reqs,), generator=rng, dtype=torch.int32)
    return batch._replace(
        rope_positions=positions.to(DEVICE), rope_deltas=deltas.to(DEVICE)
    )


def kept_positions(rng, starts: list[int]) -> torch.Tensor:
    """Positions of kept states: those before first tokens of requests, or -1."""
    before = torch.tensor([*starts, 0, 0]) - 1
    chosen = torch.randint(0, len(before), (2 * NUM_BLOCKS,), generator=rng)
    return before[chosen].to(DEVICE)


def make_hidden(
    rng, layout: DraftLayout, num_rows: int, num_sources: int
) -> HiddenRows:
    def rows(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=rng).to(DEVICE)

    sources = tuple(rows(num_rows, HIDDEN) for _ in range(num_sources))
    if layout.token_shift:
        return HiddenRows(sources, rows(num_sources * HIDDEN))
    blocks = rows(2 * NUM_BLOCKS, num_sources * HIDDEN)
    return HiddenRows(sources, blocks)


def make_tables(rng, groups: int, max_num_reqs: int) -> BlockTables:
    sizes = BLOCK_SIZES[groups]
    width = [-(-MAX_MODEL_LEN // size) for size in sizes]
    tables = BlockTables(sizes, max_num_reqs, MAX_TOKENS, width, DEVICE)
    for group, table in enumerate(tables.block_tables):
        # Ids after a request's own blocks are stale; some of its own are null blocks.
        ids = torch.randint(0, NUM_BLOCKS, table.gpu.shape, generator=rng)
        table.gpu.copy_(ids)
        held = torch.randint(0, width[group] + 1, (max_num_reqs,), generator=rng)
        tables.num_blocks.np[group] = held
    tables.num_blocks.copy_to_uva()
    return tables


def make_batch(
    rng, query_lens, starts, states, num_padded, max_num_reqs, integer
) -> VerifiedBatch:
    rejected = [integer(0, q - 1) if integer(0, 1) else 0 for q in query_lens]
    sampled, pad = [integer(0, 1) for _ in query_lens], [0] * num_padded

    def ids(*shape: int) -> torch.Tensor:
        return torch.randint(1, 900, shape, generator=rng, dtype=torch.int32).to(DEVICE)

    return verified_batch(
        query_lens + pad,
        starts + pad,
        max_num_reqs,
        input_ids=ids(sum(query_lens)),
        idx_mapping=torch.cat([states, torch.full((num_padded,), -1)]).to(DEVICE),
        num_sampled=int32(sampled + pad),
        num_rejected=int32(rejected + pad),
        last_sampled=ids(max_num_reqs, 1).long(),
        next_prefill_tokens=ids(max_num_reqs),
        temperature=torch.rand(max_num_reqs, generator=rng).to(DEVICE),
        seeds=ids(max_num_reqs).long(),
    )


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
    return buffers


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
    rng = torch.Generator().manual_seed(1)
    drafts = torch.randint(
        1, 900, (num_reqs, layout.num_speculative_tokens), generator=rng
    ).to(DEVICE)
    after, most = [], buffers.batch.max_num_tokens
    # Without drafts there is still a first pass, which writes KV.
    samples_per_pass = layout.samples_per_pass(case.num_drafts) or [1]
    for draft_pass, samples in enumerate(samples_per_pass):
        source, hidden, rows = batch, case.hidden, total
        if draft_pass:
            source, samples_before = PreviousPass(drafts, draft_pass), 1
            if (beams := layout.num_beams) > 1:
                shape, samples_before = (num_reqs, beams), beams ** (draft_pass > 1)
                tokens = torch.randint(1, 900, shape, generator=rng)
                parents = torch.randint(0, samples_before, shape, generator=rng)
                beam = tokens.to(DEVICE), draft_pass, parents.int().to(DEVICE)
                source = PreviousPass(*beam)
            if hidden is not None:
                rows_fed = num_reqs * layout.parallel_width * samples_before
                hidden = make_hidden(rng, layout, rows_fed, 1)
            rows = layout.num_follow_slots * len(case.query_lens)
        prepare(
            source,
            layout,
            buffers,
            case.tables,
            num_samples=samples,
            num_padded_tokens=min(rows + case.num_padding, most),
            limit=case.limit,
            mask_token_id=MASK,
            vocab_size=case.vocab_size,
            hidden=hidden,
        )
        after.append(copy.deepcopy(buffers))
    return after


@settings(max_examples=EXAMPLES, **SLOW)
@given(cases())
def test_kernel_equals_reference(case: Case):
    actual = run_passes(prepare_inputs, case)
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
            assert bool((at < case.limit).all())
            if case.layout.num_beams == 1:
                assert torch.equal(used % size, at % size)
                assert at.unique().numel() == at.numel()


def rows(*values: float) -> torch.Tensor:
    """[len(values), 2], each value twice."""
    return torch.tensor(values, device=DEVICE)[:, None].repeat(1, 2)


def prepared(layout, batch, tables, hidden=None) -> DraftInputs:
    """The draft batch of one request's first pass."""
    num_tokens, size = len(batch.input_ids), None if hidden is None else 2
    buffers = DraftInputs(layout, num_tokens, 1, DEVICE, size, torch.float32)
    buffers.allocate_kv_groups(1)
    prepare_inputs(
        batch, layout, buffers, tables, num_samples=layout.parallel_width,
        num_padded_tokens=num_tokens + layout.num_extra_slots, limit=64,
        mask_token_id=MASK, hidden=hidden,
    )  # fmt: skip
    return buffers


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("width", [1, 3, 7])
def test_layout_of_a_decode_step(shift: int, width: int):
    """The table in the layout's docstring, for one request."""
    layout = DraftLayout(7, shift, width)
    batch = verified_batch(
        [8], [20], num_sampled=int32([3]), num_rejected=int32([5]),
        temperature=torch.full((1,), 0.5, device=DEVICE), seeds=int64([7]),
    )  # fmt: skip
    states = (rows(*range(8)),)
    hidden = HiddenRows(states, rows(-1).flatten()) if shift else None
    buffers = prepared(layout, batch, block_tables([1, 2, 3, 4]), hidden)
    found = buffers.batch
    tokens = [100, 101, 102, SAMPLED, *[MASK] * (width - 1)][shift:]
    count = 8 + width - shift
    live = len(tokens)
    assert found.query_start_loc.tolist() == [0, count]
    assert found.seq_lens.tolist() == [20 + count]
    assert found.input_ids[:count].tolist() == tokens + [0] * (count - live)
    positions = list(range(20, 20 + live))
    assert found.positions[:count].tolist() == positions + [0] * (count - live)
    slots = [16 + p for p in positions]
    assert found.slot_mappings[0, :count].tolist() == slots + [-1] * (count - live)
    assert found.sample_rows.tolist() == [live - width + i for i in range(width)]
    assert (found.temperature.tolist(), found.seeds.tolist()) == ([0.5], [7])
    # The first draft follows the next token, which is at position 23.
    assert found.sample_positions.tolist() == [23 + i for i in range(width)]
    if shift:
        assert buffers.fed[:live, 0].tolist() == [0, 1, 2, *[-1] * (width - 1)]


@pytest.mark.parametrize("width", [1, 3])
def test_captured_batch_owns_no_blocks(width: int):
    """Dummy requests of a graph, with block counts left over from earlier steps."""
    layout = DraftLayout(7, 0, width)
    buffers = DraftInputs(layout, 64, 4, DEVICE)
    buffers.allocate_kv_groups(1)
    slots = layout.num_follow_slots
    buffers.lay_out_evenly(3, 3 * slots)
    buffers.batch.num_blocks.fill_(4)
    prepare_inputs(
        PreviousPass(int64([[1] * 7] * 3), 1), layout, buffers,
        block_tables([9] * 4, 4), num_samples=width, num_padded_tokens=3 * slots,
        limit=64, mask_token_id=MASK,
    )  # fmt: skip
    found = buffers.batch
    assert found.query_start_loc.tolist() == [0, slots, 2 * slots, *[3 * slots] * 2]
    assert bool((found.slot_mappings == PAD_SLOT_ID).all())
    assert found.sample_requests.tolist() == [-1] * 4 * width


# How the kernel is launched.

MOST_REQS = 64
PARAMETERS = inspect.signature(input_kernel._prepare_inputs_kernel.fn).parameters
CONSTANTS = [n for n, p in PARAMETERS.items() if "constexpr" in str(p.annotation)]
Launch = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture
def launch(monkeypatch) -> Launch:
    """Prepares a pass; returns the number of programs, and the kernel's constants."""
    noted: list[tuple[int, dict[str, Any]]] = []

    class Kernel:
        def __getitem__(self, grid: tuple[int, ...]):
            return lambda *_, **given: noted.append(
                (prod(grid), {name: given[name] for name in CONSTANTS})
            )

    def run(layout, num_drafts, query_lens, is_fed, draft_pass=0):
        size, n = HIDDEN if is_fed else None, len(query_lens)
        buffers = DraftInputs(layout, 4096, MOST_REQS, DEVICE, size, torch.float32)
        buffers.allocate_kv_groups(1)
        shorter, states = layout.for_drafts(num_drafts), sum(query_lens)
        source = verified_batch(query_lens, [0] * n, MOST_REQS)
        rows = states + n * shorter.num_extra_slots
        if draft_pass:
            source = PreviousPass(int64([[0] * 7] * n), draft_pass)
            states, rows = n * shorter.parallel_width, n * shorter.num_follow_slots
        hidden = make_hidden(None, layout, states, 1) if is_fed else None
        if is_fed and layout.token_shift == 0:
            hidden = hidden._replace(positions=int64([0] * 2 * NUM_BLOCKS))
        prepare_inputs(
            source, shorter, buffers, block_tables([0] * 4, MOST_REQS), num_samples=1,
            num_padded_tokens=rows, limit=64, hidden=hidden,
        )  # fmt: skip
        return noted[-1]

    monkeypatch.setattr(input_kernel, "_prepare_inputs_kernel", Kernel())
    return run


@pytest.mark.parametrize("is_fed", [False, True])
@pytest.mark.parametrize("shift", [0, 1])
def test_number_of_programs_follows_rows(launch: Launch, shift: int, is_fed: bool):
    """A long prompt does not multiply the programs of other requests."""
    prompt, decodes = [3000], [8] * (MOST_REQS - 1)
    alone, beside, mixed = (
        launch(DraftLayout(7, shift, 7), 7, query_lens, is_fed)[0]
        for query_lens in (prompt, decodes, prompt + decodes)
    )
    assert mixed <= alone + beside


@pytest.mark.parametrize("is_fed", [False, True])
@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("width", [1, 4, 7])
def test_all_lengths_run_the_same_compiled_kernel(
    launch: Launch, width: int, shift: int, is_fed: bool
):
    """Otherwise the first step with a new length would compile while serving."""
    layout = DraftLayout(7, shift, width)
    for draft_pass, lengths in ((0, range(8)), (1, range(width + 1, 8))):
        found = [launch(layout, k, [8, 3, 1], is_fed, draft_pass)[1] for k in lengths]
        assert all(constants == found[0] for constants in found)
