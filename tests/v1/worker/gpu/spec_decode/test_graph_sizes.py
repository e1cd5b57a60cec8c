# SPDX-License-Identifier: Apache-2.0
"""How many CUDA graphs "auto" captures, and that padding of batches is limited."""

from dataclasses import replace
from itertools import pairwise

import pytest

from vllm.config.compilation import CUDAGraphMode
from vllm.config.drafter.length import (
    MIN_REQUESTS,
    MIN_REQUESTS_BY_DEFAULT,
    AutoSchedule,
    candidate_lengths,
    chosen_lengths,
)
from vllm.v1.spec_decode.graph_sizes import (
    ROWS_APART,
    choose_decode_batches,
    graph_rows,
    shares_graphs,
)
from vllm.v1.worker.gpu.cudagraph_utils import (
    BatchExecutionDescriptor,
    CudaGraphManager,
)
from vllm.v1.worker.gpu.spec_decode.dflash.cudagraph import DFlashCudaGraphManager
from vllm.v1.worker.gpu.spec_decode.unified.layout import DraftLayout, draft_plans

from .test_draft_graphs import (
    FULL,
    LARGEST,
    LONGEST,
    SHARED,
    UNIFORM,
    engine_config,
    record,
)
from .test_draft_graphs import graphs as graphs_of


def target_graphs(config, kind=CudaGraphManager, support=SHARED) -> CudaGraphManager:
    """The manager of the target's graphs, as if they had been captured."""
    manager = kind.__new__(kind)
    manager.vllm_config = config
    manager.compilation_config = config.compilation_config
    manager.max_num_reqs = config.scheduler_config.max_num_seqs
    manager.decode_query_len = config.num_speculative_tokens + 1
    manager.cudagraph_mode = CUDAGraphMode.FULL_AND_PIECEWISE
    is_target = kind is CudaGraphManager
    manager.varlen_decode = is_target and shares_graphs(config, support)
    manager.ubatch_runner = None
    manager.lora_capture_cases = [0]
    manager._candidates, manager._capture_descs = {}, {}
    manager._lora_dispatch_map, manager._graphs_captured = {}, True
    manager._init_candidates()
    return manager


def target_batches(config, support=SHARED) -> list:
    return target_graphs(config, support=support)._capture_descs[FULL]


def draft_batches(config, width: int, support=SHARED) -> list:
    spec, lengths = config.speculative_config, [LONGEST]
    if spec.num_speculative_tokens_per_batch_size == "auto":
        lengths = chosen_lengths(spec)
    depths = {k: min(k, LONGEST) for k in lengths}
    plans = draft_plans(DraftLayout(LONGEST, 0, width), depths)
    return record(plans, config, support=support, piecewise=False)


# One rule: batches between two recorded ones are padded, by few rows.


def test_rows_of_shared_graphs_are_a_sixteenth_apart():
    rows = graph_rows(2000)
    assert rows[:6] == [1, 2, 4, 8, 16, 32] and graph_rows(100) == rows[:10]
    for below, m in pairwise(rows):
        assert m - below <= max(ROWS_APART, below / 8)


@pytest.mark.parametrize("max_num_seqs", [64, 256, 1024])
@pytest.mark.parametrize(
    "width, support, most",
    [(1, SHARED, 230), (7, SHARED, 330), (1, UNIFORM, 480), (7, UNIFORM, 380)],
)
def test_number_of_graphs_is_bounded(max_num_seqs, width, support, most):
    """With a fixed length there are about a hundred FULL ones."""
    config = engine_config(max_num_seqs, "auto", trims=width == LONGEST)
    draft = draft_batches(config, width, support)
    passes = sum(batch.end_pass - batch.first_pass for batch in draft)
    assert len(target_batches(config, support)) + passes <= most


@pytest.mark.parametrize("support", [SHARED, UNIFORM])
@pytest.mark.parametrize("width", [1, LONGEST])
def test_steps_of_all_lengths_have_graphs(width: int, support):
    """The target's are padded by few rows; and the drafter has one, too."""
    config = engine_config(256, "auto")
    graphs, widest = target_graphs(config, support=support), DraftLayout(7, 0, width)
    drafter = graphs_of(draft_batches(config, width, support))
    lengths = chosen_lengths(config.speculative_config)
    for k, plan in draft_plans(widest, {k: k for k in lengths}).items():
        for n in range(1, min(256, LARGEST // (k + 1)) + 1):
            rows, extra = n * (k + 1), plan.layout.num_extra_slots
            found = graphs.dispatch(n, rows, k + 1, 0, max_query_len=k + 1)
            if support == UNIFORM and found.cg_mode != FULL:
                continue  # more than its largest
            assert found.cg_mode == FULL and found.num_reqs >= n
            assert found.num_tokens - rows <= max(ROWS_APART, rows / 8)
            shape = plan.recorded_as, 0
            first = drafter.find_full(n, k + 1 + extra, *shape)
            first = first or drafter.find_ragged(n, rows + n * extra, shape[0])
            assert first is not None, (n, k)


def test_batches_of_unequal_lengths_share_the_graphs():
    """Decode batches alone: a prompt's has no `max_query_len`."""
    graphs = target_graphs(engine_config(256, "auto"))
    found = graphs.dispatch(3, 11, None, 0, max_query_len=5)
    assert (found.cg_mode, found.num_tokens, found.max_query_len) == (FULL, 16, 8)
    assert graphs.dispatch(3, 11, None, 0).cg_mode == CUDAGraphMode.PIECEWISE
    # Kernels of single rows, not those of a chain's.
    assert graphs.dispatch(3, 3, 1, 0, max_query_len=1).max_query_len == 1
    longer = graphs.dispatch(3, 11, None, 0, max_query_len=LONGEST + 2)
    assert longer.cg_mode == CUDAGraphMode.PIECEWISE


@pytest.mark.parametrize("how", ["data_parallel_size", "use_ubatching", "lora"])
def test_graphs_are_not_shared(how: str):
    config = engine_config(256, "auto")
    assert shares_graphs(config, SHARED) and not shares_graphs(config, UNIFORM)
    if how == "lora":
        config.lora_config = object()
    else:
        setattr(config.parallel_config, how, 2)
    assert not shares_graphs(config, SHARED)
    assert not shares_graphs(engine_config(256, None), SHARED)


def test_each_batch_uses_smallest_graph_of_its_length():
    """Regression: the graph with the next larger number of tokens may only be of other
    query lengths."""
    graphs = target_graphs(engine_config(256, [(1, 128, 3), (129, 256, 7)]))
    for query_len in (4, 8):
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


@pytest.mark.parametrize("max_num_seqs", [64, 100, 1024])
def test_only_large_batches_are_trimmed_by_default(max_num_seqs: int):
    config = engine_config(max_num_seqs, AutoSchedule([LONGEST]), trims=True)
    explicit = {b for b in target_batches(config) if b.max_query_len is not None}
    spec = config.speculative_config
    spec.drafter = replace(spec.drafter, is_trimmed_by_default=True)
    found = {b for b in target_batches(config) if b.max_query_len is not None}
    large = {b for b in explicit if b.num_tokens > MIN_REQUESTS_BY_DEFAULT}
    assert found == large and found < explicit


@pytest.mark.parametrize("max_num_seqs", [20, 64, 300])
def test_trees_and_chains_have_their_own_graphs(max_num_seqs: int):
    """Trees have graphs up to 256 rows; chains have the same ones as without trees."""
    nodes = 31
    schedule = AutoSchedule(candidate_lengths(LONGEST, nodes))
    config = engine_config(max_num_seqs, schedule, True, nodes)
    graphs = target_graphs(config)
    found = {b for b in graphs._capture_descs[FULL] if b.max_query_len is not None}
    assert found == set(target_batches(engine_config(max_num_seqs, "auto", True)))
    for n in range(1, 9):
        tree = n * (nodes + 1), nodes + 1
        batch = graphs.dispatch(n, *tree, 0, max_query_len=nodes + 1)
        assert (batch.cg_mode, batch.uniform_token_count) == (FULL, nodes + 1)
    drafted = {
        b.num_reqs for b in draft_batches(config, LONGEST) if b.num_drafts == nodes
    }
    assert max(drafted) == 8
    for n in range(MIN_REQUESTS, max_num_seqs + 1):
        for rows in range(n + 1, min(n * (LONGEST + 1), LARGEST + 1)):
            # A tree's graph would read positions and masks of another step.
            chain = graphs.dispatch(n, rows, None, 0, max_query_len=LONGEST + 1)
            assert chain in found, (n, rows)


def test_full_graphs_of_mixed_batches_serve_all():
    """Then decode batches get no graphs of their own."""
    batches = {FULL: [BatchExecutionDescriptor(FULL, 64, 64)]}
    for schedule in ("auto", AutoSchedule([LONGEST])):
        config = engine_config(64, schedule, trims=True)
        choose_decode_batches(target_graphs(config), batches)
        assert len(batches[FULL]) == 1
