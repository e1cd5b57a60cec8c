# SPDX-License-Identifier: Apache-2.0
"""KV cache of layers that attend to a window of the context, and to its first block."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vllm.utils.math_utils import cdiv
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import (
    BlockHashList,
    KVCacheBlock,
    resolve_block_hashes,
)
from vllm.v1.core.single_type_kv_cache_manager import SlidingWindowManager
from vllm.v1.kv_cache_interface import KVCacheSpec, SlidingWindowSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry


@dataclass(frozen=True, kw_only=True)
class SinkWindowSpec(SlidingWindowSpec):
    """A sliding window, and the attention sink: the first block.

    Attributes:
        backlog_tokens: tokens of each request, of those in `sliding_window`, that are
            held because they may be processed late.
    """

    backlog_tokens: int = 0

    @property
    def num_retained_tokens(self) -> int:
        return 0  # the runner must not null the sink

    def max_admission_blocks_per_request(
        self, max_in_flight_tokens: int, max_model_len: int
    ) -> int:
        window = super().max_admission_blocks_per_request(
            max_in_flight_tokens, max_model_len
        )
        return min(window + 1, cdiv(max_model_len, self.block_size))


class SinkWindowManager(SlidingWindowManager):
    """Holds, caches and finds the first block of a request, whatever its window is."""

    def remove_skipped_blocks(
        self,
        request_id: str,
        processed_computed_tokens: int,
        num_prompt_tokens: int | None = None,
    ) -> None:
        skipped = self.get_num_skipped_tokens(processed_computed_tokens)
        self._remove_blocks_in_range(request_id, 1, skipped // self.block_size)

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: Sequence[KVCacheBlock],
        total_computed_tokens: int,
        *args: Any,
        **kwargs: Any,
    ) -> int:
        """A first block that was found counts too, if it has to be taken back from the
        blocks that may be evicted."""
        count = super().get_num_blocks_to_allocate(
            request_id,
            num_tokens,
            new_computed_blocks,
            total_computed_tokens,
            *args,
            **kwargs,
        )
        skipped = self.get_num_skipped_tokens(total_computed_tokens)
        if skipped >= self.block_size:
            count += self._get_num_evictable_blocks(new_computed_blocks[:1])
        return count

    def add_local_computed_blocks(
        self,
        request_id: str,
        new_computed_blocks: Sequence[KVCacheBlock],
        *args: Any,
        **kwargs: Any,
    ) -> None:
        super().add_local_computed_blocks(
            request_id, new_computed_blocks, *args, **kwargs
        )
        blocks = self.req_to_blocks[request_id]
        if new_computed_blocks and blocks[0].is_null:
            self.block_pool.touch(new_computed_blocks[:1])
            blocks[0] = new_computed_blocks[0]

    @classmethod
    def find_longest_cache_hit(
        cls,
        block_hashes: BlockHashList,
        max_length: int,
        kv_cache_group_ids: list[int],
        block_pool: BlockPool,
        kv_cache_spec: KVCacheSpec,
        drop_eagle_block: bool,
        alignment_tokens: int,
        **kwargs: Any,
    ) -> tuple[tuple[list[KVCacheBlock], ...], int]:
        """Without the first block, there is no hit."""
        found, length = super().find_longest_cache_hit(
            block_hashes,
            max_length,
            kv_cache_group_ids,
            block_pool,
            kv_cache_spec,
            drop_eagle_block,
            alignment_tokens,
            **kwargs,
        )
        if not length or not found[0][0].is_null:
            return found, length
        hashes = resolve_block_hashes(
            block_hashes, block_pool.hash_block_size, kv_cache_spec.block_size
        )
        sinks = block_pool.get_cached_block(hashes[0], kv_cache_group_ids)
        if sinks is None:
            return tuple([] for _ in found), 0
        for blocks, sink in zip(found, sinks, strict=True):
            blocks[0] = sink
        return found, length

    @classmethod
    def reachable_block_mask(
        cls, start_block: int, end_block: int, *args: Any, **kwargs: Any
    ) -> list[bool] | None:
        mask = super().reachable_block_mask(start_block, end_block, *args, **kwargs)
        if mask and start_block == 0:
            mask[0] = True
        return mask


def register_sink_window() -> None:
    KVCacheSpecRegistry.register(
        SinkWindowSpec, SinkWindowManager, uniform_type_base_spec=SinkWindowSpec
    )
