# SPDX-License-Identifier: Apache-2.0
"""Which batches of which draft lengths are worth a CUDA graph.

Every length that an engine may choose has graphs of its own. Sizes that one length
needs are recorded for the others too, rounded up: nearly every number of requests has a
graph of every length, hundreds of them, which take time and memory at start.
"""

from collections import defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING

from vllm.config.compilation import CUDAGraphMode
from vllm.config.drafter.length import MAX_TREE_ROWS, is_auto

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.worker.gpu.cudagraph_utils import (
        BatchExecutionDescriptor,
        CudaGraphManager,
    )

# Matrix products take rows in tiles: fewer make no difference while weights are read,
# and one in sixteen at most where they are not.
ROWS_APART = 16


def worth_recording(counts: Iterable[int], query_len: int) -> set[int]:
    """Of numbers of requests, those that differ enough: powers of two, the largest.

    Args:
        counts: numbers of requests that could be recorded.
        query_len: tokens of each request.
    """
    kept: list[int] = []
    for n in sorted(counts, reverse=True):
        is_power = n & (n - 1) == 0
        if not kept or is_power or (kept[-1] - n) * query_len >= ROWS_APART:
            kept.append(n)
    return set(kept)


def thin_decode_batches(
    vllm_config: "VllmConfig",
    by_mode: dict[CUDAGraphMode, list["BatchExecutionDescriptor"]],
) -> None:
    """Leaves out batches of the target that are not worth a graph, for "auto".

    Args:
        vllm_config: the engine's.
        by_mode: batches to be recorded; those of equal queries are thinned, in place.
    """
    if not is_auto(vllm_config.speculative_config):
        return
    depth = vllm_config.speculative_config.drafter.num_speculative_tokens
    for batches in by_mode.values():
        batches[:] = [b for b in batches if not _is_large_tree(b, depth)]
        counts: dict[int, set[int]] = {}
        for batch in batches:
            if batch.uniform_token_count is not None:
                same = counts.setdefault(batch.uniform_token_count, set())
                same.add(batch.num_reqs)
        kept = {
            length: worth_recording(same, length) for length, same in counts.items()
        }
        batches[:] = [
            batch
            for batch in batches
            if batch.uniform_token_count is None
            or batch.num_reqs in kept[batch.uniform_token_count]
        ]


def _is_large_tree(batch: "BatchExecutionDescriptor", depth: int) -> bool:
    rows = batch.uniform_token_count or 0
    return rows > depth + 1 and batch.num_tokens > MAX_TREE_ROWS


def offer_every_length(manager: "CudaGraphManager") -> None:
    """Lets a batch find the smallest graph of its own query length.

    vLLM looks at the graphs of the next larger number of tokens only, which may all be
    of other lengths.
    """
    spec = manager.vllm_config.speculative_config
    if spec is None or not spec.uses_dynamic_speculative_decoding():
        return
    by_length = defaultdict(list)
    for batch in manager._capture_descs.get(CUDAGraphMode.FULL, ()):
        if (length := batch.uniform_token_count) is not None:
            key = length, batch.num_active_loras, batch.num_ubatches
            by_length[key].append(batch)
    offered = defaultdict(list)
    for (_, num_loras, _), batches in by_length.items():
        start = 0
        for batch in sorted(batches, key=lambda batch: batch.num_tokens):
            for num_tokens in range(start, batch.num_tokens + 1):
                offered[num_tokens, num_loras].append(batch)
            start = batch.num_tokens + 1
    for key, batches in offered.items():
        others = manager._candidates.get(key, ())
        rest = [batch for batch in others if batch.uniform_token_count is None]
        manager._candidates[key] = batches + rest
