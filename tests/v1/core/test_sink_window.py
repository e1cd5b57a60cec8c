# SPDX-License-Identifier: Apache-2.0
"""Which blocks of a window with an attention sink are held, freed and found."""

import pickle
from collections.abc import Callable

import pytest
import torch

from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.utils.math_utils import cdiv
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sink_window import SinkWindowManager, SinkWindowSpec
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry
from vllm.v1.request import Request

SIZE, WINDOW, MAX_LEN = 4, 10, 400
SHAPE = {"num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
FULL = FullAttentionSpec(block_size=SIZE, **SHAPE)


def sink(window: int = WINDOW, size: int = SIZE) -> SinkWindowSpec:
    return SinkWindowSpec(block_size=size, sliding_window=window, **SHAPE)


def manager_of(
    window: SinkWindowSpec, num_blocks: int = 300, caches: bool = True, **more
) -> KVCacheManager:
    specs = {"target": FULL, "drafter": window}
    groups = [KVCacheGroupSpec([name], spec) for name, spec in specs.items()]
    config = KVCacheConfig(num_blocks, kv_cache_tensors=[], kv_cache_groups=groups)
    return KVCacheManager(
        config,
        max_model_len=MAX_LEN,
        scheduler_block_size=window.block_size,
        hash_block_size=SIZE,
        max_in_flight_tokens=16,
        enable_caching=caches,
        **more,
    )


@pytest.fixture
def request_of() -> Callable[[int], Request]:
    init_none_hash(sha256)
    hasher = get_request_block_hasher(SIZE, sha256)
    count = iter(range(100))

    def make(length: int) -> Request:
        prompt, sampling = list(range(length)), SamplingParams(max_tokens=MAX_LEN)
        return Request(str(next(count)), prompt, sampling, None, block_hasher=hasher)

    return make


def held(manager: KVCacheManager, request: Request, group: int = 1) -> list[int]:
    """Indices of the blocks that a request holds in a group."""
    blocks = manager.get_blocks(request.request_id).blocks[group]
    return [index for index, block in enumerate(blocks) if not block.is_null]


def admit(manager: KVCacheManager, request: Request) -> int:
    """Computes a whole prompt; returns the tokens found in the prefix cache."""
    blocks, count, *_ = manager.get_computed_blocks(request)
    new = request.num_tokens - count
    assert manager.allocate_slots(request, new, count, blocks) is not None
    request.num_computed_tokens = request.num_tokens
    return count


@pytest.mark.parametrize("window", [2, 3, 4, 5, 10, 40])
def test_blocks_outside_the_window_are_freed(window: int, request_of):
    manager, request = manager_of(sink(window)), request_of(3)
    free = manager.block_pool.get_num_free_blocks()
    admit(manager, request)
    for token in range(100):
        known = request.num_computed_tokens
        request.append_output_token_ids([token])
        assert manager.allocate_slots(request, 1) is not None
        begin = max(known + 1 - window, 0) // SIZE
        last = known // SIZE
        assert held(manager, request) == sorted({0, *range(begin, last + 1)})
        assert held(manager, request, 0) == [*range(last + 1)]
        request.num_computed_tokens += 1
    manager.free(request)
    assert manager.block_pool.get_num_free_blocks() == free


def test_blocks_of_steps_in_flight_are_held(request_of):
    """They may hold rejected tokens, after which the request continues before them."""
    manager, request = manager_of(sink()), request_of(60)
    admit(manager, request)
    request.num_in_flight_tokens = 20
    manager.allocate_slots(request, 1)
    assert held(manager, request) == [0, *range((60 - 20 + 1 - WINDOW) // SIZE, 16)]


@pytest.mark.parametrize("eagle", [False, True])
@pytest.mark.parametrize("size", [SIZE, 2 * SIZE])
def test_a_long_prompt_is_found(size: int, eagle: bool, request_of):
    """With the first block and those of the window, which it then holds."""
    manager = manager_of(sink(size=size), use_eagle=eagle)
    first, again = request_of(100), request_of(100)
    assert admit(manager, first) == 0
    for token in range(30):
        first.append_output_token_ids([token])
        manager.allocate_slots(first, 1)
        first.num_computed_tokens += 1
    manager.free(first)
    free = manager.block_pool.get_num_free_blocks()
    found = admit(manager, again)
    # The last token of a prompt is always computed, or for EAGLE its last block.
    assert found == (100 // size - 1 if eagle else 99 // size) * size
    begin = (found + 1 - WINDOW) // size
    assert held(manager, again) == [0, *range(begin, cdiv(100, size))]
    held_in_all = sum(len(held(manager, again, group)) for group in (0, 1))
    assert free - manager.block_pool.get_num_free_blocks() == held_in_all
    blocks = manager.get_blocks(again.request_id).blocks[1]
    assert all(block.ref_cnt == 1 for block in blocks if not block.is_null)
    manager.free(again)
    assert manager.block_pool.get_num_free_blocks() == free


def test_nothing_is_found_without_the_first_block(request_of):
    manager, first = manager_of(sink()), request_of(100)
    admit(manager, first)
    block = manager.get_blocks(first.request_id).blocks[1][0]
    manager.free(first)
    assert manager.get_computed_blocks(request_of(100))[1] == 96
    manager.block_pool._maybe_evict_cached_block(block)
    assert manager.get_computed_blocks(request_of(100))[1] == 0


def test_a_found_first_block_counts_as_taken(request_of):
    """Otherwise an allocation that was promised would fail."""
    manager, first = manager_of(sink()), request_of(100)
    admit(manager, first)
    manager.free(first)
    again, free = request_of(100), manager.block_pool.get_num_free_blocks()
    blocks, count, *_ = manager.get_computed_blocks(again)
    promised = manager.coordinator.get_num_blocks_to_allocate(
        again.request_id, 100, blocks.blocks, 0, count, count, 100
    )
    assert manager.allocate_slots(again, 100 - count, count, blocks) is not None
    assert free - manager.block_pool.get_num_free_blocks() == promised


@pytest.mark.parametrize("length", [9, 17, 40, 100, MAX_LEN])
def test_admission_covers_what_is_held(length: int, request_of):
    """In chunks of 8 tokens, of which two may be in flight."""
    spec = sink()
    cap = spec.max_admission_blocks_per_request(16, MAX_LEN)
    manager, request, most = manager_of(spec), request_of(length - 1), 0
    while request.num_computed_tokens < length - 1:
        new = min(8, length - 1 - request.num_computed_tokens)
        request.num_in_flight_tokens = min(8, request.num_computed_tokens)
        assert manager.allocate_slots(request, new, num_lookahead_tokens=1) is not None
        most = max(most, len(held(manager, request)))
        request.num_computed_tokens += new
    assert most <= cap
    assert cap <= cdiv(WINDOW - 1 + 16, SIZE) + 2
    assert spec.max_admission_blocks_per_request(16, 9) == 3


def test_first_block_is_cached_even_if_only_some_are():
    kept = SinkWindowManager.reachable_block_mask(
        start_block=0,
        end_block=20,
        alignment_tokens=10 * SIZE,
        kv_cache_spec=sink(),
        use_eagle=False,
        retention_interval=0,
        reachable_boundaries=[15 * SIZE],
    )
    assert [index for index, is_kept in enumerate(kept) if is_kept] == [0, 7, 8, 9]


def test_spec_has_its_own_manager_and_group():
    assert KVCacheSpecRegistry.get_manager_class(sink()) is SinkWindowManager
    assert pickle.loads(pickle.dumps(sink())) == sink()
    layers = {"target": FULL, "drafter": sink()}
    assert UniformTypeKVCacheSpecs.from_specs(layers) is None
