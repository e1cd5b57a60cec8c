# SPDX-License-Identifier: Apache-2.0
"""Which draft batches are captured as CUDA graphs, and which graph serves a batch."""

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

from vllm.config.compilation import CUDAGraphMode
from vllm.config.drafter import DrafterConfig
from vllm.config.drafter.length import covering_lookup
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.worker.gpu.spec_decode.unified.graphs import (
    FREE_ROWS,
    DraftBatchDescriptor,
    DraftGraphs,
    StepShapes,
    batches_to_record,
    trimmed_starts,
)
from vllm.v1.worker.gpu.spec_decode.unified.layout import (
    DraftLayout,
    DraftPlan,
    draft_plans,
)

SIZES = [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64]
LONGEST, LARGEST = 7, 512
# Of attention: one graph serves chains of all lengths, or each has its own.
SHARED, UNIFORM = AttentionCGSupport.ALWAYS, AttentionCGSupport.UNIFORM_BATCH
FULL, PIECEWISE = CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE


def capture_sizes(max_num_seqs: int, query_lens: list[int]) -> list[int]:
    """Capture sizes as in vLLM: multiples of 8 and 16 rows, and each number of requests
    times each query length."""
    rows = [1, 2, 4, *range(8, 256, 8), *range(256, LARGEST + 1, 16)]
    counts = [n for n in rows if n <= max_num_seqs] + [max_num_seqs]
    each = [n * q for n in counts for q in query_lens if n * q <= LARGEST]
    return sorted({*rows, *each})


def engine_config(
    max_num_seqs: int = 8,
    schedule=None,
    trims: bool = False,
    num_nodes: int | None = None,
    sizes: list[int] | None = None,  # by default vLLM's for the schedule
    enforce_eager: bool | None = None,
) -> SimpleNamespace:
    """Of an engine that drafts up to `LONGEST` deep."""
    lengths, most = [LONGEST], num_nodes or LONGEST
    if schedule == "auto":
        lengths = covering_lookup(max_num_seqs, most, schedule)[1:]
    sizes = sizes or capture_sizes(max_num_seqs, [k + 1 for k in lengths])
    drafter = DrafterConfig(
        "draft_model", LONGEST, num_nodes=num_nodes, is_unified=True
    )
    return SimpleNamespace(
        compilation_config=SimpleNamespace(
            cudagraph_capture_sizes=sizes, max_cudagraph_capture_size=sizes[-1]
        ),
        speculative_config=SimpleNamespace(
            num_speculative_tokens_per_batch_size=schedule,
            num_speculative_tokens=most,
            enforce_eager=enforce_eager,
            drafter=drafter,
            enable_adaptive_verification=trims,
            uses_dynamic_speculative_decoding=lambda: schedule is not None,
        ),
        scheduler_config=SimpleNamespace(max_num_seqs=max_num_seqs),
        model_config=SimpleNamespace(is_encoder_decoder=False),
        cache_config=SimpleNamespace(use_kda_recoverssm=False),
        lora_config=None,
        parallel_config=SimpleNamespace(
            data_parallel_size=1,
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
            use_ubatching=False,
        ),
        num_speculative_tokens=most,
    )


config = partial(engine_config, sizes=SIZES)


def plans_of(width: int, shift: int, lengths: list[int]) -> dict[int, DraftPlan]:
    widest = DraftLayout(max(lengths), shift, width)
    return draft_plans(widest, {k: k for k in lengths})


def record(plans, vllm_config=None, **more) -> list[DraftBatchDescriptor]:
    how = {
        "cudagraph_mode": CUDAGraphMode.FULL_AND_PIECEWISE,
        "support": SHARED,
        "piecewise": True,
        "fused": True,
    } | more
    mode, support = how.pop("cudagraph_mode"), how.pop("support")
    made = batches_to_record(vllm_config or config(), mode, plans, support, **how)
    assert len(made) == len(set(made))
    return made


def graphs(batches, is_recorded: bool = True) -> DraftGraphs:
    """A manager of these batches, without a device to capture them on."""
    manager = DraftGraphs.__new__(DraftGraphs)
    manager._batches, manager._graphs_captured = batches, is_recorded
    manager._init_candidates()
    return manager


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("width", [1, 3, 7])
def test_every_decode_batch_has_graphs(width: int, shift: int):
    plans = plans_of(width, shift, [7])
    found, layout = graphs(record(plans)), plans[7].layout
    for num_reqs in range(1, 9):
        first = found.find_full(num_reqs, 8 + layout.num_extra_slots, 7, 0)
        assert first.num_reqs == num_reqs
        assert first.num_tokens == num_reqs * (8 + layout.num_extra_slots)
        if width < 7:
            later = found.find_full(num_reqs, layout.num_follow_slots, 7, 1)
            assert num_reqs <= later.num_reqs <= 8
            assert (later.first_pass, later.end_pass) == (1, layout.num_passes)
    assert found.find_full(9, 8 + layout.num_extra_slots, 7, 0) is None
    assert found.find_full(1, 5, 7, 0) is None
    assert found.find_ragged(8, 20 + 8 * width, 7) is None  # nothing is trimmed
    assert found.find_piecewise(17).num_tokens == 24
    assert found.find_piecewise(65) is None


def test_largest_batches_are_captured_first():
    """Smaller graphs then reuse the memory of larger ones. None is found before."""
    found = graphs(record(plans_of(1, 1, [3])), is_recorded=False)
    for mode in (FULL, PIECEWISE):
        tokens = [desc.num_tokens for desc in found._capture_descs[mode]]
        assert tokens == sorted(tokens, reverse=True)
    assert found.find_full(1, 4, 3, 0) is found.find_piecewise(1) is None


def test_autoregressive_lengths_share_later_passes():
    """Each pass is captured once, and every length ends at the end of a graph."""
    plans = plans_of(1, 0, [0, 1, 3, 4, 7])
    found = graphs(record(plans))
    spans = {(b.first_pass, b.end_pass) for b in found._batches if b.first_pass}
    assert spans == {(1, 3), (3, 4), (4, 7)}
    replayed = []
    found.run_fullgraph = lambda desc: replayed.append((desc.first_pass, desc.end_pass))
    for length, expected in ((3, 1), (4, 2), (7, 3)):
        replayed.clear()
        graph = found.find_full(5, 1, plans[length].later_recorded_as, 1)
        found.run_until(graph, plans[length].layout.num_passes)
        assert len(replayed) == expected
        assert replayed[0][0] == 1 and replayed[-1][1] == length


def test_semi_parallel_lengths_have_their_own_later_passes():
    plans = plans_of(3, 1, [0, 3, 5, 7])
    assert all(plan.later_recorded_as == k for k, plan in plans.items())
    later = [b for b in record(plans) if b.first_pass]
    assert {(b.num_drafts, b.end_pass) for b in later} == {(5, 2), (7, 3)}


def test_one_graph_per_pass_if_metadata_is_built_on_host():
    batches = record(plans_of(1, 1, [4]), fused=False)
    spans = {(b.first_pass, b.end_pass) for b in batches if b.cg_mode == FULL}
    assert spans == {(0, 1), (1, 2), (2, 3), (3, 4)}


@pytest.mark.parametrize(
    "mode, enforce_eager, kinds",
    [
        (CUDAGraphMode.NONE, None, set()),
        (PIECEWISE, None, {PIECEWISE}),
        (CUDAGraphMode.FULL_DECODE_ONLY, None, {FULL}),
        (CUDAGraphMode.FULL_AND_PIECEWISE, None, {FULL, PIECEWISE}),
        (CUDAGraphMode.FULL_AND_PIECEWISE, True, set()),  # enforce_eager of the drafter
    ],
)
def test_graphs_follow_cudagraph_mode_of_target(mode, enforce_eager, kinds: set):
    eager = config(enforce_eager=enforce_eager)
    batches = record(plans_of(1, 0, [4]), eager, cudagraph_mode=mode)
    assert {batch.cg_mode for batch in batches} == kinds


@pytest.mark.parametrize(
    "support, recorded",
    [
        (AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE, {(1, None)}),
        (AttentionCGSupport.UNIFORM_BATCH, {(1, None), (6, None)}),
        (AttentionCGSupport.ALWAYS, {(1, None), (6, None), (None, 6)}),
    ],
)
def test_graphs_follow_support_of_attention(support, recorded: set, caplog_vllm):
    made = config(trims=True)
    batches = record(plans_of(1, 0, [4]), made, support=support, piecewise=False)
    assert {(b.uniform_token_count, b.max_query_len) for b in batches} == recorded
    is_all = support == AttentionCGSupport.ALWAYS
    assert ("attention_backend" in caplog_vllm.text) is not is_all


# First passes of trimmed batches.


def test_trimmed_batches_that_draft_far_more_than_they_verify_have_no_graphs():
    """Memory is reserved for the rows of the largest batch."""
    plans = plans_of(15, 0, [1, 3, 7, 15])
    batches = record(plans, config(16, trims=True))
    assert max(batch.num_tokens for batch in batches) <= 3 * SIZES[-1]
    found = graphs(batches)
    extra = {k: 16 * plan.layout.num_extra_slots for k, plan in plans.items()}
    assert found.find_ragged(16, 64 + extra[7], 7) is not None
    assert found.find_ragged(16, 64 + extra[15], 15) is None


def test_trees_have_no_graphs_of_trimmed_batches():
    """Their query lengths are those of chains: trees seldom follow trimmed chains."""
    plans = draft_plans(DraftLayout(7, 0, 7), {0: 0, 3: 3, 7: 7, 15: 7})
    batches = record(plans, config(16, trims=True))
    ragged = {(b.num_drafts, b.max_query_len) for b in batches if b.max_query_len}
    assert ragged == {(3, 8 + 3), (7, 8 + 7)}


@pytest.mark.parametrize("support", [SHARED, UNIFORM])
def test_trees_of_several_passes_share_graphs_up_to_the_rows_that_pay(support):
    """Regression: with 0 among the lengths, first passes of trees had no limit."""
    depths = {0: 0, 3: 3, 7: 7, 11: 3, 15: 4, 27: 7}
    plans = draft_plans(DraftLayout(7, 1, 1), depths)
    first = {0: 0, 3: 7, 7: 7, 11: 27, 15: 27, 27: 27}
    later = {0: 7, 3: 7, 7: 7, 11: 27, 15: 27, 27: 27}
    assert {k: plan.recorded_as for k, plan in plans.items()} == first
    assert {k: plan.later_recorded_as for k, plan in plans.items()} == later
    made = record(plans, engine_config(256, "auto", num_nodes=27), support=support)
    batches = [b for b in made if b.num_drafts == 27]
    # Eight rows after a tree, one after a step without drafts, or any number up to
    # eight; one in later passes.
    slots = {(b.uniform_token_count, b.first_pass) for b in batches}
    firsts = {(None, 0)} if support == SHARED else {(8, 0), (1, 0)}
    assert slots == firsts | {(1, 1), (1, 3), (1, 4)}
    # 21 requests have 252 rows of trees of 11 nodes; they may be padded.
    assert 21 <= max(b.num_reqs for b in batches) <= 32


@pytest.mark.parametrize("shift", [0, 1])
def test_first_pass_serves_all_numbers_of_verified_rows(shift: int):
    """With one token per pass; also if some requests have drafts and others none."""
    found = graphs(record(plans_of(1, shift, [0, 1, 3, 7]), engine_config(256, "auto")))
    for n in (1, 9, 64, 200):
        for rows in range(n, min(8 * n, 512) + 1):
            extra = n * (1 - shift)
            graph = found.find_ragged(n, rows + extra, 7)
            assert n <= graph.num_reqs < 2 * n or graph.num_reqs == 256
            padded = graph.num_tokens - graph.num_reqs * (1 - shift)
            assert padded <= max(rows * 1.5, 8 * graph.num_reqs, FREE_ROWS)
    # One without drafts has few rows, and its own.
    assert found.find_full(100, 2 - shift, 0, 0).num_reqs <= 128
    assert found.find_ragged(9, 18, 0) is None


def trimmed_batch(extra_drafts: int) -> SimpleNamespace:
    """Eight requests of 7 drafts each, of which some are verified."""
    return SimpleNamespace(
        num_reqs=8,
        num_tokens=8 + extra_drafts,
        num_scheduled_tokens=np.full(8, 8, dtype=np.int32),
        num_draft_tokens=extra_drafts,
        num_draft_tokens_per_req=np.full(8, 7, dtype=np.int32),
        query_start_loc_np=None,  # not known on the host
        max_query_len=8,
        decode_graph_eligible=True,
    )


@pytest.mark.parametrize("verified, longest", [(1, 2), (6, 7), (7, 8), (40, 8)])
def test_longest_query_of_trimmed_batch_is_upper_bound(verified: int, longest: int):
    """Regression: attention skips rows past the longest query length it is given."""
    starts = trimmed_starts(trimmed_batch(verified))
    assert starts.dtype == np.int32
    assert (starts[0], starts[-1]) == (0, 8 + verified)
    assert np.diff(starts).min() >= 1 and np.diff(starts).max() == longest


@pytest.mark.parametrize("fits", [True, False])
@pytest.mark.parametrize("has_embeddings", [True, False])
def test_trimmed_batch_uses_its_graph(fits: bool, has_embeddings: bool):
    """Unless it contains multimodal embeddings: graphs take token ids only."""
    plans = plans_of(7, 0, [7])
    recorded = graphs(record(plans, config(8, trims=True)))
    shapes = StepShapes(recorded, 0, None, fits, 8, has_embeddings)
    fits = fits and not has_embeddings
    shape = shapes.first(trimmed_batch(20), plans[7])
    assert shape.num_unpadded_tokens == 8 + 20 + 8 * 7
    assert shape.is_full == fits
    if fits:
        assert (shape.graph.num_reqs, shape.num_tokens) == (8, 64 + 8 * 7)
