# SPDX-License-Identifier: Apache-2.0
"""How many CUDA graphs "auto" captures, and that padding of batches is limited."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from vllm.config.compilation import CUDAGraphMode
from vllm.config.drafter import DrafterConfig
from vllm.config.drafter.length import (
    MIN_REQUESTS,
    MIN_REQUESTS_BY_DEFAULT,
    AutoSchedule,
    candidate_lengths,
    chosen_lengths,
    covering_lookup,
)
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.spec_decode.graph_sizes import (
    ROWS_APART,
    choose_decode_batches,
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
    """Capture sizes as in vLLM: multiples of 8 and 16 rows, and each number of requests
    times each query length."""
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
    """The manager of the target's graphs, as if they had been captured."""
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
def test_number_of_graphs_of_large_engine_is_bounded(
    width: int, trims: bool, most: int
):
    """Limits how many more graphs, and passes in graphs, "auto" has than a fixed
    length."""
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
def test_drafter_has_a_graph_where_target_has_one(width: int, schedule):
    """Also for trimmed batches, with at most `max_query_len` rows per request."""
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
def test_each_batch_uses_smallest_graph_of_its_length(schedule):
    """Regression: the graph with the next larger number of tokens may only be of other
    query lengths."""
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
def test_drafter_of_fixed_length_has_graphs_of_that_length_only(schedule):
    """DFlash and DSpark: there is a graph for each batch size."""
    graphs = target_graphs(engine_config(256, schedule), DFlashCudaGraphManager)
    recorded = graphs._capture_descs[FULL]
    assert {batch.uniform_token_count for batch in recorded} == {LONGEST + 1}
    for n in range(1, 65):
        found = graphs.dispatch(n, n * (LONGEST + 1), LONGEST + 1, num_active_loras=0)
        assert found.cg_mode == FULL and found.num_reqs >= n


# Trimmed batches: only a part of the drafts is verified.


@pytest.mark.parametrize("schedule", ["auto", AutoSchedule([LONGEST])])
@pytest.mark.parametrize("max_num_seqs", [4, 100, 1024])
def test_trimmed_batches_are_captured_in_addition(max_num_seqs: int, schedule):
    trimmed = target_batches(engine_config(max_num_seqs, schedule, trims=True))
    others = [batch for batch in trimmed if batch.max_query_len is None]
    assert others == target_batches(engine_config(max_num_seqs, schedule))
    ragged = [batch for batch in trimmed if batch.max_query_len is not None]
    assert len(ragged) <= 60 and bool(ragged) == (max_num_seqs >= MIN_REQUESTS)
    # vLLM captures them with the tokens spread as evenly as possible over requests.
    assert all(b.num_reqs < b.num_tokens <= b.num_reqs * (LONGEST + 1) for b in ragged)


@pytest.mark.parametrize("max_num_seqs", [64, 100, 1024])
def test_only_large_batches_are_trimmed_by_default(max_num_seqs: int):
    config = engine_config(max_num_seqs, "auto", trims=True)
    explicit = {b for b in target_batches(config) if b.max_query_len is not None}
    spec = config.speculative_config
    spec.drafter = replace(spec.drafter, is_trimmed_by_default=True)
    found = {b for b in target_batches(config) if b.max_query_len is not None}
    large = {b for b in explicit if b.num_reqs >= MIN_REQUESTS_BY_DEFAULT}
    assert found == large and found < explicit


@pytest.mark.parametrize("schedule", ["auto", AutoSchedule([LONGEST])])
def test_trimmed_and_other_batches_use_their_own_graphs(schedule):
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
        # A batch without a budget uses none of them, whatever its query lengths.
        assert graphs.dispatch(n, n + 3, None, 0).cg_mode == CUDAGraphMode.PIECEWISE


@pytest.mark.parametrize("max_num_seqs", [20, 64, 300])
def test_trees_and_trimmed_chains_have_their_own_graphs(max_num_seqs: int):
    """Trees have graphs up to 256 rows; chains have the same ones as without trees."""
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
            # A tree's graph would read positions and masks of another step.
            chain = graphs.dispatch(n, rows, None, 0, max_query_len=LONGEST + 1)
            assert chain in found, (n, rows)


def test_full_graphs_of_mixed_batches_serve_trimmed_ones():
    """Trimmed batches get no graphs of their own if mixed batches have FULL ones."""
    batches = {FULL: [BatchExecutionDescriptor(FULL, 64, 64)]}
    config = engine_config(64, AutoSchedule([LONGEST]), trims=True)
    choose_decode_batches(config, batches)
    assert len(batches[FULL]) == 1


def test_single_length_keeps_all_graphs():
    config = engine_config(256, AutoSchedule([LONGEST]), trims=True)
    found = [b for b in target_batches(config) if b.uniform_token_count is not None]
    fixed = target_batches(engine_config(256, None))
    assert found == [b for b in fixed if b.uniform_token_count is not None]
    assert set(range(1, 33)) <= {batch.num_reqs for batch in fixed}
