# SPDX-License-Identifier: Apache-2.0
"""Which rows are kept in the backlog, and when the drafter processes them."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.worker.gpu.input_batch import InputBatch, InputBuffers
from vllm.v1.worker.gpu.spec_decode.draft_tree.accepted import TargetStep
from vllm.v1.worker.gpu.spec_decode.unified import backlog
from vllm.v1.worker.gpu.spec_decode.unified.backlog import (
    Backlog,
    DraftInput,
    catch_up,
    catch_up_now,
    for_kv_cache,
    make_backlog,
)
from vllm.v1.worker.gpu.spec_decode.unified.inputs import HiddenRows

from .batches import DEVICE, int32, int64, verified_batch

ROWS, REQUESTS, BLOCK = 12, 8, 4
PADDING = 3  # padded requests, as for a CUDA graph
Rows = dict[int, list[int]]  # positions by request state


def given(rows: Rows, prompts: int = 0, drafts: bool = False) -> DraftInput:
    """A step of these rows; the last `prompts` requests are prefilling.

    Token id, slot and hidden state of a row are 100 times its request state plus its
    position.
    """
    states, counts = [*rows], [len(each) for each in rows.values()]
    verified = verified_batch(
        counts,
        [each[0] for each in rows.values()],
        REQUESTS,
        idx_mapping=int64(states),
        num_sampled=int32(states),  # distinct values
    )
    owners = torch.repeat_interleave(int64(states), int64(counts))
    ids = (100 * owners + verified.positions).to(torch.int32)
    buffers = InputBuffers(REQUESTS, 64, DEVICE)
    starts = np.cumsum([0, *counts], dtype=np.int32)
    batch = replace(
        InputBatch.make_dummy(len(states), len(ids), buffers),
        idx_mapping_np=np.array(states),
        num_scheduled_tokens=np.array(counts, dtype=np.int32),
        query_start_loc_np=np.pad(starts, (0, PADDING), mode="edge"),
        is_prefilling_np=np.arange(len(states)) >= len(states) - prompts,
        seq_lens_cpu_upper_bound=torch.tensor(
            [each[-1] + 1 for each in rows.values()], dtype=torch.int32
        ),
        num_draft_tokens_per_req=np.array(counts) - 1 if drafts else None,
    )
    states_fed = ids.float()[:, None].repeat(1, 2)
    hidden = HiddenRows((states_fed, -states_fed), states_fed[0])
    rejected = torch.zeros_like(verified.num_sampled)
    slots = ids.long().repeat(3, 1)
    step = TargetStep(batch, rejected, states_fed, None, slots)
    return DraftInput(step, verified._replace(input_ids=ids), hidden)


def described(found: DraftInput) -> Rows:
    """Rows as `given` takes them; asserts that all tensors agree on each row."""
    step, verified, hidden = found
    ids, starts = verified.input_ids, verified.query_start_loc.tolist()
    assert starts == step.batch.query_start_loc_np.tolist()
    assert starts[-1] == step.batch.num_tokens == len(ids)
    for source, sign in zip(hidden.sources, (1, -1), strict=True):
        assert torch.equal(source, sign * ids.float()[:, None].repeat(1, 2))
    assert torch.equal(step.slot_mappings, ids.long().repeat(3, 1))
    assert not verified.num_rejected.any() and step.num_rejected.shape == (
        len(starts) - 1,
    )
    rows = {}
    ends = step.batch.seq_lens_cpu_upper_bound.tolist()
    for i, state in enumerate(verified.idx_mapping.tolist()):
        assert state == step.batch.idx_mapping_np[i]
        own = slice(starts[i], starts[i + 1])
        rows[state] = verified.positions[own].tolist()
        assert (ids[own] - verified.positions[own] == 100 * state).all()
        assert ends[i] == rows[state][-1] + 1
    return rows


@pytest.fixture
def kept() -> Backlog:
    return Backlog(ROWS, REQUESTS)


def test_rows_are_returned_by_request_in_order_of_steps(kept: Backlog):
    assert not kept
    assert kept.put(given({5: [9], 2: [30]})) is None
    assert kept.put(given({2: [31], 7: [3]})) is None
    assert kept.put(given({5: [10], 7: [4], 2: [32]})) is None
    assert kept
    found = kept.take()
    assert described(found) == {2: [30, 31, 32], 5: [9, 10], 7: [3, 4]}
    # The last sampled token of each follows its last row.
    assert found.verified.num_sampled.tolist() == [1, 1, 1]
    assert not kept
    kept.put(given({5: [11]}))
    assert described(kept.take()) == {5: [11]}


def test_prompts_are_not_kept(kept: Backlog):
    """Not even if they have only one token."""
    rows = {5: [9], 2: [30], 4: [0, 1, 2], 1: [7]}
    left = kept.put(given(rows, prompts=2))
    assert described(left) == {4: [0, 1, 2], 1: [7]}
    assert left.verified.num_sampled.tolist() == [4, 1]
    assert described(kept.take()) == {2: [30], 5: [9]}
    only_prompts = given({3: [0, 1]}, prompts=1)
    assert kept.put(only_prompts) is only_prompts


def test_steps_that_verify_drafts_are_not_kept(kept: Backlog):
    """Not even rows of requests without drafts in such a step."""
    step = given({5: [9], 2: [30, 31, 32]}, drafts=True)
    assert kept.put(step) is step
    assert not kept


def due(kept: Backlog, num_reqs=2, drafts=False, used=()) -> bool:
    return kept.is_due(num_reqs, drafts, set(used))


def test_rows_are_kept_until_needed(kept: Backlog):
    assert not due(kept, drafts=True)  # nothing to process
    for position in range(5):
        kept.put(given({5: [position], 2: [position]}))
    assert not due(kept)
    assert due(kept, num_reqs=3)  # no room
    assert due(kept, drafts=True)
    assert not due(kept, used=[1]) and due(kept, used=[1, 5])


@pytest.mark.parametrize(
    "first, steps, block, is_needed",
    [
        (0, 3, BLOCK, False),
        (0, 4, BLOCK, True),
        (4, 3, BLOCK, False),
        (3, 3, BLOCK, True),
        (6, 5, BLOCK, True),
        (0, 4, None, False),
        # Right after drafts the host does not know yet how many were accepted.
        (0, 1, BLOCK, True),
        (0, 1, None, False),
    ],
)
def test_blocks_that_prefix_caching_may_hit_are_filled(
    kept: Backlog, first: int, steps: int, block: int | None, is_needed: bool
):
    """Rows of an ended request are kept, and due, if they fill a block."""
    kept.block_size = block
    kept.drafts()
    for position in range(first, first + steps):
        kept.put(given({5: [position], 2: [1000 * BLOCK + position]}))
    kept.forget({5, 6})
    assert due(kept, used=[5, 6]) == is_needed
    assert [*described(kept.take())] == ([2, 5] if is_needed else [2])


@pytest.mark.parametrize(
    "num_cached, block, is_due",
    [(1000, BLOCK, False), (2003, BLOCK, True), (2003, None, False)],
)
def test_prefix_caching_may_hit_blocks_of_running_requests(
    kept: Backlog, num_cached: int, block: int | None, is_due: bool
):
    """The usual hit, a system prompt, contains none of the kept rows."""
    kept.block_size = block
    for position in (2000, 2001, 2002):
        kept.put(given({5: [position], 2: [2 * position]}))
    assert kept.is_due(2, False, set(), num_cached) == is_due


def test_rows_of_ended_requests_are_dropped(kept: Backlog):
    """The next request with the same state has only its own rows."""
    kept.put(given({5: [9], 2: [30]}))
    kept.put(given({5: [10], 2: [31]}))
    kept.forget({5})
    kept.put(given({5: [0], 2: [32]}))
    assert described(kept.take()) == {2: [30, 31, 32], 5: [0]}
    kept.put(given({3: [9]}))
    kept.forget({3})
    assert not kept
    for position in range(ROWS):  # there is as much room as before
        assert not due(kept, num_reqs=1)
        kept.put(given({4: [position]}))


class Steps:
    """A runner of requests a, b and c, which records its catch-up passes."""

    def __init__(self, monkeypatch, kept: Backlog) -> None:
        self.passes: list[Rows] = []
        states = SimpleNamespace(req_id_to_index={"a": 5, "b": 2, "c": 3})
        self.kept = kept
        self.runner = SimpleNamespace(speculator=self, req_states=states)
        self.backlog = kept
        monkeypatch.setattr(backlog, "catch_up_now", lambda runner: self.catch_up())

    def catch_up(self) -> None:
        self.passes.append(described(self.kept.take()))

    def step(self, **fields) -> list[Rows]:
        usual = {
            "finished_req_ids": set(),
            "preempted_req_ids": None,
            "scheduled_new_reqs": [],
            "num_scheduled_tokens": {"a": 1, "b": 1},
            "num_spec_tokens_to_schedule": 0,
            "scheduled_spec_decode_tokens": {},
        }
        catch_up(self.runner, SimpleNamespace(**(usual | fields)))
        passes, self.passes = self.passes, []
        return passes


def new_request(name: str, num_cached: int = 0) -> SimpleNamespace:
    return SimpleNamespace(req_id=name, num_computed_tokens=num_cached)


@pytest.mark.parametrize(
    "fields, runs, is_kept",
    [
        ({}, False, True),
        ({"num_spec_tokens_to_schedule": 3}, True, False),
        ({"scheduled_spec_decode_tokens": {"b": [1]}}, True, False),
        ({"num_scheduled_tokens": {"c": 9}}, False, True),
        ({"num_scheduled_tokens": {"a": 9}}, True, False),
        # A continued session needs the KV of its preceding tokens.
        ({"scheduled_new_reqs": [new_request("a")]}, True, False),
        ({"scheduled_new_reqs": [new_request("d")]}, False, True),
        ({"scheduled_new_reqs": [new_request("d"), new_request("e", 5)]}, True, False),
        ({"finished_req_ids": {"a", "d"}}, True, False),
        ({"preempted_req_ids": {"a"}}, True, False),
        ({"finished_req_ids": {"b"}}, False, True),
    ],
)
def test_catch_up_before_a_step(
    monkeypatch, kept: Backlog, fields, runs: bool, is_kept: bool
):
    kept.block_size = BLOCK
    steps = Steps(monkeypatch, kept)
    for position in (3, 4):  # fills a block of request a, none of request b
        kept.put(given({5: [position], 2: [position + 1]}))
    assert steps.step(**fields) == [{2: [4, 5], 5: [3, 4]}] * runs
    assert bool(kept) == is_kept
    left = {5: [3, 4]}
    if "b" not in fields.get("finished_req_ids", ()):
        left[2] = [4, 5]
    assert steps.step(num_spec_tokens_to_schedule=1) == [left] * is_kept


def test_no_catch_up_on_requests_that_end(monkeypatch, kept: Backlog):
    """Without prefix caching nobody needs their KV, even if the step drafts."""
    steps = Steps(monkeypatch, kept)
    for position in (3, 4):
        kept.put(given({5: [position], 2: [position + 1]}))
    ended = {"finished_req_ids": {"b"}, "num_spec_tokens_to_schedule": 3}
    assert steps.step(**ended) == [{5: [3, 4]}]
    kept.put(given({3: [7]}))
    assert steps.step(preempted_req_ids={"c"}, num_spec_tokens_to_schedule=3) == []


@pytest.mark.parametrize("kept", [None, Backlog(ROWS, REQUESTS)])
def test_no_catch_up_with_empty_backlog(kept):
    """Regression: an engine failed at start if it timed steps past the drafter's
    context."""

    def catch_up() -> None:
        raise AssertionError

    speculator = SimpleNamespace(backlog=kept, catch_up=catch_up)
    catch_up_now(SimpleNamespace(speculator=speculator))


def drafter(**given):
    usual = {"fed_hidden_size": None, "takes_embeddings": False, "rope_dims": 0}
    return SimpleNamespace(**usual | given)


def config(**parallel):
    usual = {
        "data_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "prefill_context_parallel_size": 1,
    }
    return SimpleNamespace(
        parallel_config=SimpleNamespace(**(usual | parallel)),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=8192, max_num_seqs=64),
        kv_transfer_config=None,
    )


@pytest.mark.parametrize("fed, rows", [(None, 8192), (4096, 2048)])
def test_memory_of_backlog_is_limited(fed: int | None, rows: int):
    assert make_backlog(config(), drafter(fed_hidden_size=fed)).max_rows == rows


@pytest.mark.parametrize(
    "parallel, fed, why",
    [
        ({"data_parallel_size": 2}, {}, "data parallelism"),
        ({}, {"takes_embeddings": True}, "embeddings of images"),
        ({}, {"rope_dims": 3}, "M-RoPE drafters"),
    ],
)
def test_unsupported_backlog_is_logged(caplog_vllm, parallel, fed, why: str):
    caplog_vllm.set_level("INFO", logger="vllm")
    assert make_backlog(config(**parallel), drafter(**fed)) is None
    assert f"does not support {why}" in caplog_vllm.text


def layer(kind=FullAttentionSpec, **given):
    sizes = {"num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
    return kind(block_size=BLOCK, **sizes, **given)


FULL = layer()
WINDOW = layer(SlidingWindowSpec, sliding_window=16)
CHUNKS = layer(ChunkedLocalAttentionSpec, attention_chunk_size=16)


def together(*layers):
    named = {str(number): each for number, each in enumerate(layers)}
    return UniformTypeKVCacheSpecs(block_size=BLOCK, kv_cache_specs=named)


@pytest.mark.parametrize(
    "specs, are_kept",
    [
        ([FULL, together(FULL, FULL)], True),
        # vLLM keeps all blocks of these without its hybrid KV cache manager.
        ([layer(sliding_window=16)], True),
        ([FULL, WINDOW], False),
        ([together(WINDOW, WINDOW)], False),
        ([CHUNKS], False),
    ],
)
def test_rows_are_kept_only_if_blocks_are_not_freed(
    caplog_vllm, kept: Backlog, specs, are_kept: bool
):
    """Otherwise a row's block may belong to another request once it is written."""
    caplog_vllm.set_level("INFO", logger="vllm")
    found = for_kv_cache(kept, specs, BLOCK)
    assert found is (kept if are_kept else None)
    assert ("does not support drafters with sliding" in caplog_vllm.text) != are_kept
    assert kept.block_size == (BLOCK if are_kept else None)
    assert for_kv_cache(None, specs, BLOCK) is None
