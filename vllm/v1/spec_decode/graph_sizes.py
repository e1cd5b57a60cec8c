# SPDX-License-Identifier: Apache-2.0
"""Which batches of which draft lengths are worth a CUDA graph.

Every draft length that an engine may choose has its own graphs. vLLM would also capture
the batch sizes of each length for all others, rounded up: nearly every number of
requests has a graph of every length then, hundreds in all, which take time and memory
at start.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cache
from typing import TYPE_CHECKING

from vllm.config.compilation import CUDAGraphMode
from vllm.config.drafter.length import (
    MAX_TREE_ROWS,
    least_trimmed,
    lengths_vary,
    trims,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.worker.gpu.cudagraph_utils import (
        BatchExecutionDescriptor,
        CudaGraphManager,
    )

# Matrix products process rows in tiles: fewer rows save no time while memory-bound, and
# at most one in sixteen otherwise.
ROWS_APART = 16


def worth_recording(counts: Iterable[int], query_len: int) -> set[int]:
    """The numbers of requests that get a graph: powers of two, the largest, and others
    that are at least `ROWS_APART` rows apart.

    Args:
        counts: numbers of requests that could be captured.
        query_len: tokens of each request.
    """
    kept: list[int] = []
    for n in sorted(counts, reverse=True):
        is_power = n & (n - 1) == 0
        if not kept or is_power or (kept[-1] - n) * query_len >= ROWS_APART:
            kept.append(n)
    return set(kept)


def _is_large_tree(batch: "BatchExecutionDescriptor", depth: int) -> bool:
    rows = batch.uniform_token_count or 0
    return rows > depth + 1 and batch.num_tokens > MAX_TREE_ROWS


def keep_own_length(manager: "CudaGraphManager") -> None:
    """Removes batches of other lengths, for a drafter with a fixed draft length."""
    own = manager.decode_query_len
    for batches in manager._capture_descs.values():
        batches[:] = [b for b in batches if b.uniform_token_count in (None, own)]


@cache
def trimmed_rows(most: int) -> list[int]:
    """Numbers of rows at which ragged batches get a graph: about a tenth apart."""
    rows, step = [], ROWS_APART
    while (last := rows[-1] if rows else 0) + step <= most:
        rows.append(last + step)
        if rows[-1] >= 10 * step:
            step *= 2
    return rows


def trimmed_batches(
    vllm_config: "VllmConfig", query_len: int
) -> Iterator[tuple[int, int]]:
    """Requests and rows of the trimmed batches that get a graph, if there are any.

    Numbers of requests are powers of two, since padding costs little.

    Args:
        vllm_config: the engine's.
        query_len: the most rows of a request.
    """
    if not trims(vllm_config.speculative_config):
        return
    most = vllm_config.scheduler_config.max_num_seqs
    least = least_trimmed(vllm_config.speculative_config)
    largest = vllm_config.compilation_config.max_cudagraph_capture_size or 0
    counts = {least << bits for bits in range(most.bit_length())} | {most}
    for n in sorted(n for n in counts if least <= n <= most):
        rows = {m for m in trimmed_rows(largest) if n < m < n * query_len}
        rows.add(min(n * query_len, largest))
        yield from ((n, m) for m in sorted(rows) if m > n)


def choose_decode_batches(
    vllm_config: "VllmConfig",
    by_mode: dict[CUDAGraphMode, list["BatchExecutionDescriptor"]],
) -> None:
    """With "auto", removes batches of the target that are not worth a graph, and adds
    trimmed ones.

    Args:
        vllm_config: the engine's.
        by_mode: batches to capture, changed in place.
    """
    from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor

    spec = vllm_config.speculative_config
    if lengths_vary(spec):
        for batches in by_mode.values():
            _thin(batches, spec.drafter.num_speculative_tokens)
    full = by_mode.get(CUDAGraphMode.FULL, [])
    # If there are none, graphs of mixed batches serve all batches.
    has_uniform = any(batch.uniform_token_count is not None for batch in full)
    if not has_uniform or not trims(spec):
        return
    query_len = spec.drafter.num_speculative_tokens + 1
    full += [
        BatchExecutionDescriptor(
            CUDAGraphMode.FULL, num_tokens=m, num_reqs=n, max_query_len=query_len
        )
        for n, m in trimmed_batches(vllm_config, query_len)
    ]


def _thin(batches: list["BatchExecutionDescriptor"], depth: int) -> None:
    """Removes uniform batches that are not worth a graph."""
    batches[:] = [batch for batch in batches if not _is_large_tree(batch, depth)]
    counts: dict[int | None, set[int]] = defaultdict(set)
    for batch in batches:
        counts[batch.uniform_token_count].add(batch.num_reqs)
    kept = {q: worth_recording(same, q) for q, same in counts.items() if q is not None}
    batches[:] = [
        batch
        for batch in batches
        if batch.uniform_token_count is None
        or batch.num_reqs in kept[batch.uniform_token_count]
    ]


def offer_every_length(manager: "CudaGraphManager") -> None:
    """Lets a batch find the smallest graph of its own query length.

    vLLM only considers graphs of the next larger number of tokens, which may all have
    other query lengths. Graphs of ragged batches come after, by rows and requests.
    """
    spec = manager.vllm_config.speculative_config
    if spec is None or not spec.uses_dynamic_speculative_decoding():
        return
    full = manager._capture_descs.get(CUDAGraphMode.FULL, ())
    offered = _by_own_length([b for b in full if b.uniform_token_count is not None])
    unlike = sorted(
        (b for b in full if b.max_query_len is not None),
        key=lambda batch: (batch.num_tokens, batch.num_reqs),
    )
    for key in manager._candidates.keys() | offered.keys():
        others = manager._candidates.get(key, ())
        manager._candidates[key] = [
            *offered.get(key, ()),
            *(b for b in unlike if b.num_tokens >= key[0]),
            *(b for b in others if b.uniform_token_count is b.max_query_len is None),
        ]


def _by_own_length(
    batches: list["BatchExecutionDescriptor"],
) -> dict[tuple[int, int], list["BatchExecutionDescriptor"]]:
    """The smallest batch of each query length, by tokens and active LoRAs."""
    by_length = defaultdict(list)
    for batch in batches:
        key = batch.uniform_token_count, batch.num_active_loras, batch.num_ubatches
        by_length[key].append(batch)
    offered = defaultdict(list)
    for (_, num_loras, _), same in by_length.items():
        start = 0
        for batch in sorted(same, key=lambda batch: batch.num_tokens):
            for num_tokens in range(start, batch.num_tokens + 1):
                offered[num_tokens, num_loras].append(batch)
            start = batch.num_tokens + 1
    return offered
