# SPDX-License-Identifier: Apache-2.0
"""How many CUDA graphs "auto" takes, and that no batch is padded by much."""

from types import SimpleNamespace

import pytest

from vllm.config.compilation import CUDAGraphMode
from vllm.config.drafter import DrafterConfig
from vllm.config.drafter.length import (
    MIN_REQUESTS,
    AutoSchedule,
    candidate_lengths,
    chosen_lengths,
    covering_lookup,
)
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.spec_decode.dynamic.graph_sizes import (
    ROWS_APART,
    choose_decode_batches,
    worth_recording,
)
from vllm.v1.worker.gpu.cudagraph_utils import (
    BatchExecutionDescriptor,
    CudaGraphManager,
)
from vllm.v1.worker.gpu.spec_decode.dflash.cudagraph import DFlashCudaGraphManager
from vllm.v1.worker.gpu.spec_decode.unified.graphs import batches_to_record
from vllm.v1.worker.gpu.spec_decode.unified.layout import DraftLayout

LONGEST, LARGEST = 7, 512
FULL = CUDAGraphMode.FULL


def capture_sizes(max_num_seqs: int, query_lens: list[int]) -> list[int]:
    """As vLLM sizes them: rows by 8 and by 16, and requests of each query length."""
    rows = [1, 2, 4, *range(8, 256, 8), *range(256, LARGEST + 1, 16)]
    counts = [n for n in rows if n <= max_num_seqs] + [max_num_seqs]
    each = [n * q for n in counts for q in query_lens if n * q <= LARGEST]
    return sorted({*rows, *each})


def engine_config(
    max_num_seqs: int, schedule, trims: bool = False, num_nodes: int | None = None
) -> SimpleNamespace:
    lengths, most = [LONGEST], num_nodes or LONGEST
    if schedule == "auto":
        lengths = covering_lookup(max_num_seqs, most, schedule)[1:]
    compilation = SimpleNamespace(
        cudagraph_capture_sizes=capture_sizes(max_num_seqs, [k + 1 for k in lengths]),
        max_cudagraph_capture_size=LARGEST,
    )
    spec = SimpleNamespace(
        num_speculative_tokens_per_batch_size=schedule,
        num_speculative_tokens=most,
        enforce_eager=None,
        drafter=DrafterConfig(
            "draft_model", LONGEST, num_nodes=num_nodes, is_unified=True
        ),
        enable_adaptive_verification=trims,
        uses_dynamic_speculative_decoding=lambda: schedule is not None,
    )
    return SimpleNamespace(
        compilation_config=compilation,
        speculative_config=spec,
        scheduler_config=SimpleNamespace(max_num_seqs=max_num_seqs),
        cache_config=SimpleNamespace(use_kda_recoverssm=False),
        num_speculative_tokens=most,
    )


def target_graphs(config, kind=CudaGraphManager) -> CudaGraphManager:
    """What vLLM would record of the target, as if it was."""
    manager = kind.__new__(kind)
    manager.vllm_config = config
    manager.compilation_config = config.compilation_config
    manager.max_num_reqs = config.scheduler_config.max_num_seqs
    manager.decode_query_len = config.num_speculative_tokens + 1
    manager.cudagraph_mode = CUDAGraphMode.FULL_AND_PIECEWISE
    manager.varlen_decode, manager.ubatch_runner = False, None
    manager.lora_capture_cases = [0]
    manager._candidates, manager._capture_descs = {}, {}
    manager._lora_dispatch_map, manager._graphs_captured = {}, True
    manager._init_candidates()
    return manager


def target_batches(config) -> list:
    return target_graphs(config)._capture_descs[FULL]


def draft_batches(config, width: int) -> list:
    widest = DraftLayout(LONGEST, 0, width)
    spec, lengths = config.speculative_config, [LONGEST]
    if spec.num_speculative_tokens_per_batch_size == "auto":
        lengths = chosen_lengths(spec)
    return batches_to_record(
        config,
        CUDAGraphMode.FULL_DECODE_ONLY,
        {k: widest.for_drafts(k) for k in lengths},
        AttentionCGSupport.ALWAYS,
        piecewise=False,
        fused=True,
    )


@pytest.mark.parametrize("trims, most", [(False, 500), (True, 720)])
@pytest.mark.parametrize("width", [1, LONGEST])
def test_a_large_engine_starts_within_bounds(width: int, trims: bool, most: int):
    """Of graphs, and of the passes within, more than with a fixed length."""
    graphs, passes = {}, {}
    for schedule in (None, "auto"):
        config = engine_config(1024, schedule, trims and schedule == "auto")
        target, draft = target_batches(config), draft_batches(config, width)
        graphs[schedule] = len(target) + len(draft)
        draft_passes = sum(batch.end_pass - batch.first_pass for batch in draft)
        passes[schedule] = len(target) + draft_passes
    assert graphs["auto"] - graphs[None] <= most
    assert passes["auto"] - passes[None] <= most


@pytest.mark.parametrize("schedule", ["auto", AutoSchedule([LONGEST])])
@pytest.mark.parametrize("width", [1, LONGEST])
def test_the_drafter_has_a_graph_where_the_target_has_one(width: int, schedule):
    """Trimmed batches too, which have at most `max_query_len` rows a request."""
    config = engine_config(256, schedule, trims=True)
    widest, found = DraftLayout(LONGEST, 0, width), set()
    for batch in draft_batches(config, width):
        extra = widest.for_drafts(batch.num_drafts).num_extra_slots
        rows, most = batch.num_tokens - batch.num_reqs * extra, batch.max_query_len
        if batch.first_pass == 0:
            found.add((batch.num_reqs, rows, most and most - extra))
    target = {
        (b.num_reqs, b.num_tokens, b.max_query_len) for b in target_batches(config)
    }
    assert target <= found
    assert len({most for _, _, most in target}) == 2


@pytest.mark.parametrize("schedule", ["auto", [(1, 128, 3), (129, 256, 7)]])
def test_every_batch_finds_the_smallest_graph_of_its_length(schedule):
    """Defect: the next larger number of tokens may be of other lengths only."""
    lengths = candidate_lengths(LONGEST) if schedule == "auto" else [3, 7]
    graphs = target_graphs(engine_config(256, schedule))
    for query_len in (k + 1 for k in lengths):
        recorded = [
            batch.num_reqs
            for batch in graphs._capture_descs[FULL]
            if batch.uniform_token_count == query_len
        ]
        for n in range(1, max(recorded) + 1):
            found = graphs.dispatch(n, n * query_len, query_len, num_active_loras=0)
            assert found.cg_mode == FULL, (n, query_len)
            assert found.num_reqs == min(m for m in recorded if m >= n)
    mixed = graphs.dispatch(3, 77, None, num_active_loras=0)
    assert (mixed.cg_mode, mixed.num_tokens) == (CUDAGraphMode.PIECEWISE, 80)


@pytest.mark.parametrize("schedule", ["auto", [(1, 128, 3), (129, 256, 7)]])
def test_a_drafter_that_always_drafts_as_many_has_graphs_for_that_alone(schedule):
    """DFlash and DSpark: a batch of any size finds one."""
    graphs = target_graphs(engine_config(256, schedule), DFlashCudaGraphManager)
    recorded = graphs._capture_descs[FULL]
    assert {batch.uniform_token_count for batch in recorded} == {LONGEST + 1}
    for n in range(1, 65):
        found = graphs.dispatch(n, n * (LONGEST + 1), LONGEST + 1, num_active_loras=0)
        assert found.cg_mode == FULL and found.num_reqs >= n


def test_counts_that_differ_by_less_than_a_tile_share_a_graph():
    """Or lengths that an engine chooses from have hundreds."""
    assert worth_recording(range(1, 11), 8) == {10, 8, 6, 4, 2, 1}
    assert worth_recording(range(1, 41), 1) == {40, 32, 16, 8, 4, 2, 1}
    assert worth_recording([3], 5) == {3}


# Batches of which a part of the drafts is verified.


@pytest.mark.parametrize("schedule", ["auto", AutoSchedule([LONGEST])])
@pytest.mark.parametrize("max_num_seqs", [4, 100, 1024])
def test_trimmed_batches_are_recorded_beside_the_others(max_num_seqs: int, schedule):
    trimmed = target_batches(engine_config(max_num_seqs, schedule, trims=True))
    others = [batch for batch in trimmed if batch.max_query_len is None]
    assert others == target_batches(engine_config(max_num_seqs, schedule))
    ragged = [batch for batch in trimmed if batch.max_query_len is not None]
    assert len(ragged) <= 60 and bool(ragged) == (max_num_seqs >= MIN_REQUESTS)
    # vLLM records them on so many tokens of each request, as equal as can be.
    assert all(b.num_reqs < b.num_tokens <= b.num_reqs * (LONGEST + 1) for b in ragged)


@pytest.mark.parametrize("schedule", ["auto", AutoSchedule([LONGEST])])
def test_every_trimmed_batch_has_a_graph_and_others_have_theirs(schedule):
    config = engine_config(64, schedule, trims=True)
    graphs = target_graphs(config)
    for n in range(MIN_REQUESTS, 65):
        for rows in range(n + 1, n * (LONGEST + 1)):
            found = graphs.dispatch(n, rows, None, 0, max_query_len=LONGEST + 1)
            assert (found.cg_mode, found.uniform_token_count) == (FULL, None)
            assert n <= found.num_reqs < 2 * n
            assert found.num_tokens < max(rows, found.num_reqs) * 1.25 + ROWS_APART
        uniform = n * (LONGEST + 1), LONGEST + 1
        found = graphs.dispatch(n, *uniform, 0, max_query_len=None)
        assert found == target_graphs(engine_config(64, schedule)).dispatch(
            n, *uniform, 0
        )
        # What no budget trims finds none of them, whatever its queries.
        assert graphs.dispatch(n, n + 3, None, 0).cg_mode == CUDAGraphMode.PIECEWISE


@pytest.mark.parametrize("max_num_seqs", [20, 64, 300])
def test_trees_and_trimmed_chains_have_graphs_of_their_own(max_num_seqs: int):
    """Of trees up to 256 rows; of chains as many as where there are no trees."""
    nodes = 31
    schedule = AutoSchedule(candidate_lengths(LONGEST, nodes))
    config = engine_config(max_num_seqs, schedule, True, nodes)
    graphs = target_graphs(config)
    found = {b for b in graphs._capture_descs[FULL] if b.max_query_len is not None}
    chains = target_batches(engine_config(max_num_seqs, "auto", trims=True))
    assert found == {b for b in chains if b.max_query_len is not None}
    for n in (1, 8):
        tree = graphs.dispatch(n, n * (nodes + 1), nodes + 1, 0, max_query_len=None)
        assert (tree.cg_mode, tree.uniform_token_count) == (FULL, nodes + 1)
    drafted = {
        b.num_reqs for b in draft_batches(config, LONGEST) if b.num_drafts == nodes
    }
    assert max(drafted) == 8
    for n in range(MIN_REQUESTS, max_num_seqs + 1):
        for rows in range(n + 1, min(n * (LONGEST + 1), LARGEST + 1)):
            # A graph of trees would take positions and masks for it from another step.
            chain = graphs.dispatch(n, rows, None, 0, max_query_len=LONGEST + 1)
            assert chain in found, (n, rows)


def test_graphs_of_mixed_batches_serve_trimmed_ones_where_there_are_such():
    """Of more rows than theirs none would be left to a mixed batch."""
    batches = {FULL: [BatchExecutionDescriptor(FULL, 64, 64)]}
    config = engine_config(64, AutoSchedule([LONGEST]), trims=True)
    choose_decode_batches(config, batches)
    assert len(batches[FULL]) == 1


def test_a_length_alone_keeps_every_graph():
    config = engine_config(256, AutoSchedule([LONGEST]), trims=True)
    found = [b for b in target_batches(config) if b.uniform_token_count is not None]
    fixed = target_batches(engine_config(256, None))
    assert found == [b for b in fixed if b.uniform_token_count is not None]
    assert set(range(1, 33)) <= {batch.num_reqs for batch in fixed}
