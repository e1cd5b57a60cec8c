# SPDX-License-Identifier: Apache-2.0
"""Which batches are worth a CUDA graph if the draft length varies.

vLLM would capture every batch size of each length, rounded up for all others: hundreds
of graphs, which take time and memory at start. Here one graph serves chains of every
length by its number of rows, where attention can do that; elsewhere, and for trees,
each length has its own, of fewer batch sizes.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING

from vllm.config.compilation import CUDAGraphMode
from vllm.config.drafter.length import (
    MAX_TREE_ROWS,
    chosen_lengths,
    least_trimmed,
    lengths_vary,
    trims,
)
from vllm.v1.attention.backend import AttentionCGSupport

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.worker.gpu.cudagraph_utils import (
        BatchExecutionDescriptor,
        CudaGraphManager,
    )

# Up to about 256 rows a step's time hardly grows with them; then it is proportional. So
# batches are padded by one row in so many, or by as many as that is of 256 rows: chains
# of the target by few, batches with prompts, with trees, or of a drafter by more.
PADDED_SHARE, COARSE_SHARE = 16, 8
ROWS_APART = 256 // PADDED_SHARE  # matrix products process rows in such tiles
FEW = 8  # requests


def worth_recording(
    counts: Iterable[int], query_len: int = 1, share: int = COARSE_SHARE
) -> list[int]:
    """The numbers of requests that get a graph, ascending: powers of two, the largest,
    and those without which a batch would be padded by more than one row in `share`, if
    that is more than 256 / `share` rows.

    Args:
        counts: numbers of requests that could be captured.
        query_len: rows of each request.
    """
    kept: list[int] = []
    descending = sorted(set(counts), reverse=True)
    for n, below in pairwise([*descending, 0]):
        next_kept = kept[-1] if kept else n
        padding = (next_kept - below - 1) * query_len
        is_power = n & (n - 1) == 0
        if not kept or is_power or padding * share > max(256, next_kept * query_len):
            kept.append(n)
    return kept[::-1]


@cache
def graph_rows(most: int) -> list[int]:
    """Numbers of rows, up to `most`, at which chains of any length get a graph: they
    are `ROWS_APART`, or between a sixteenth and an eighth apart."""
    rows, step = [1, 2, 4, 8], ROWS_APART
    while rows[-1] < most:
        rows.append(rows[-1] // step * step + step)
        if rows[-1] >= PADDED_SHARE * step:
            step *= 2
    return [m for m in rows if m <= most]


def shares_graphs(config: "VllmConfig", support: AttentionCGSupport) -> bool:
    """Whether a graph serves chains of every length.

    Data-parallel ranks agree on equally many rows for each request, and microbatches
    and LoRA adapters on how a batch is split.

    Args:
        support: what graphs the attention backends support.
    """
    is_ragged = support == AttentionCGSupport.ALWAYS
    if not (is_ragged and lengths_vary(config.speculative_config)):
        return False
    parallel = config.parallel_config
    ranks = (
        parallel.data_parallel_size,
        parallel.decode_context_parallel_size,
        parallel.prefill_context_parallel_size,
    )
    is_split = parallel.use_ubatching or config.lora_config is not None
    # Cross-attention is captured with queries of the mean length.
    is_decoder = not config.model_config.is_encoder_decoder
    return max(ranks) == 1 and is_decoder and not is_split


def keep_own_length(manager: "CudaGraphManager") -> None:
    """Removes batches of other lengths, for a drafter with a fixed draft length."""
    own = manager.decode_query_len
    for batches in manager._capture_descs.values():
        batches[:] = [b for b in batches if b.uniform_token_count in (None, own)]


def choose_decode_batches(
    manager: "CudaGraphManager",
    by_mode: dict[CUDAGraphMode, list["BatchExecutionDescriptor"]],
) -> None:
    """With "auto", replaces batches that are not worth a graph, and adds those of which
    only part of the drafts is verified.

    Args:
        manager: of the graphs; it has batches with a `max_query_len` if
            `shares_graphs`.
        by_mode: batches to capture, changed in place.
    """
    spec = manager.vllm_config.speculative_config
    if lengths_vary(spec):
        for batches in by_mode.values():
            _thin(batches, spec.drafter.num_speculative_tokens)
    full = by_mode.get(CUDAGraphMode.FULL, [])
    # If there are neither, graphs of mixed batches serve all batches.
    is_shared = any(batch.max_query_len is not None for batch in full)
    has_uniform = any(batch.uniform_token_count is not None for batch in full)
    if is_shared and lengths_vary(spec):
        full[:] = [*_chains(manager), *_trees(manager)]
    elif has_uniform and trims(spec):
        full += _chains(manager, least_trimmed(spec))


def _thin(batches: list["BatchExecutionDescriptor"], depth: int) -> None:
    """Removes batches that are not worth a graph."""
    sizes: dict[int | None, set[int]] = defaultdict(set)
    for batch in batches:
        query_len = batch.uniform_token_count
        is_tree = query_len is not None and query_len > depth + 1
        if not is_tree or batch.num_tokens <= MAX_TREE_ROWS:
            sizes[query_len].add(batch.num_tokens // (query_len or 1))
    kept = set()
    for query_len, counts in sizes.items():
        is_chain = query_len is not None and query_len <= depth + 1
        each, share = query_len or 1, PADDED_SHARE if is_chain else COARSE_SHARE
        kept |= {(query_len, n * each) for n in worth_recording(counts, each, share)}
    batches[:] = [b for b in batches if (b.uniform_token_count, b.num_tokens) in kept]


def _chains(
    manager: "CudaGraphManager", least: int = 0
) -> Iterator["BatchExecutionDescriptor"]:
    """Batches of chains of any length, of more than `least` rows.

    A request that is only padding has no rows. Still, few are not padded to many: some
    attention kernels split the context by the number of requests.
    """
    from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor

    spec = manager.vllm_config.speculative_config
    query_len = spec.drafter.num_speculative_tokens + 1
    largest = manager.compilation_config.max_cudagraph_capture_size
    most = min(manager.max_num_reqs * query_len, largest)
    for m in sorted({*graph_rows(most), most}):
        fewest, counts = -(-m // query_len), {min(m, manager.max_num_reqs)}
        if fewest <= FEW:
            counts.add(fewest)
        for n in counts if m > least else ():
            yield BatchExecutionDescriptor(
                CUDAGraphMode.FULL, m, n, max_query_len=query_len
            )
        # Attention kernels are faster for the single rows of steps without drafts.
        if not least and m <= manager.max_num_reqs:
            yield BatchExecutionDescriptor(CUDAGraphMode.FULL, m, m, max_query_len=1)


def _trees(manager: "CudaGraphManager") -> Iterator["BatchExecutionDescriptor"]:
    """Batches of trees that may pay."""
    from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor

    spec = manager.vllm_config.speculative_config
    largest = manager.compilation_config.max_cudagraph_capture_size
    for query_len in (k + 1 for k in chosen_lengths(spec) if spec.drafter.is_tree(k)):
        most = min(MAX_TREE_ROWS, largest) // query_len
        counts = range(1, min(most, manager.max_num_reqs) + 1)
        for n in worth_recording(counts, query_len):
            yield BatchExecutionDescriptor(
                CUDAGraphMode.FULL, n * query_len, n, uniform_token_count=query_len
            )


def offer_every_length(manager: "CudaGraphManager") -> None:
    """Lets a batch find the smallest graph of its own query length.

    vLLM only considers graphs of the next larger number of tokens, which may all have
    other query lengths. Graphs of ragged batches come after, by rows and requests.
    """
    spec = manager.vllm_config.speculative_config
    if spec is None or not spec.uses_dynamic_speculative_decoding():
        return
    full = manager._capture_descs.get(CUDAGraphMode.FULL, ())
    ascending = sorted(
        full, key=lambda b: (b.num_tokens, b.num_reqs, b.max_query_len or 0)
    )
    for (num_tokens, num_loras), others in manager._candidates.items():
        own, ragged = {}, []
        for batch in ascending:
            if batch.num_tokens < num_tokens or batch.num_active_loras != num_loras:
                continue
            if batch.max_query_len is not None:
                ragged.append(batch)
            elif batch.uniform_token_count is not None:
                length = batch.uniform_token_count, batch.num_ubatches
                own.setdefault(length, batch)
        others = (b for b in others if b.uniform_token_count is b.max_query_len is None)
        manager._candidates[num_tokens, num_loras] = [*own.values(), *ragged, *others]
