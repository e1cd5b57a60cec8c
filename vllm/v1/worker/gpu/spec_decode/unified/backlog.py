# SPDX-License-Identifier: Apache-2.0
"""The backlog: tokens of steps without drafts that the drafter has yet to process.

The drafter has to process every token for its KV cache to be complete. In a step that
drafts nothing, a pass over one token per request would take about as long as one over
many. So these rows are kept, with their hidden states, and one pass processes the rows
of many steps: before a step that drafts, or once the backlog is full. Drafts are the
same as if the drafter had run in every step.

Rows of prompts are not kept: there are too many, and a pass over them is efficient.
"""

from collections.abc import Iterable, Set
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from vllm.config import VllmConfig
from vllm.config.drafter import MAX_NODES
from vllm.logger import init_logger
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheSpec,
    RSWASpec,
    iter_layer_specs,
)
from vllm.v1.worker.gpu.spec_decode.draft_tree.accepted import TargetStep
from vllm.v1.worker.workspace import use_workspace_lane

from .drafter import Drafter
from .inputs import HiddenRows
from .structs import VerifiedBatch

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

logger = init_logger(__name__)

# Most rows kept with hidden states: from three layers of an 8B model they take 50 MB.
# The time of larger passes is proportional to their rows.
MAX_FED_ROWS = 2048


class DraftInput(NamedTuple):
    """Inputs of a draft step; `hidden` is None for drafters without hidden states."""

    step: TargetStep
    verified: VerifiedBatch
    hidden: HiddenRows | None

    def columns(self) -> list[torch.Tensor]:
        """The tensors with an entry per row: [at least T, ...] each."""
        ids, positions = self.verified.input_ids, self.verified.positions
        sources = () if self.hidden is None else self.hidden.sources
        return [ids, positions, self.step.slot_mappings.T, *sources]

    def without_rows(self) -> "DraftInput":
        """The same without hidden states, which may be large."""
        step = self.step._replace(last_hidden=None, aux_hidden=None)
        hidden = self.hidden and self.hidden._replace(sources=())
        return DraftInput(step, self.verified, hidden)

    def of_requests(
        self,
        columns: list[torch.Tensor],
        states: np.ndarray,
        counts: np.ndarray,
        ends: np.ndarray,
        num_sampled: torch.Tensor,
    ) -> "DraftInput":
        """The same for other requests, without drafts.

        Args:
            columns: as `columns` returns them, of the requests' rows.
            states: [m], request states.
            counts: [m], rows of each.
            ends: [m] int32, upper bounds of each one's length up to its last row.
            num_sampled: [m] int32, as in `VerifiedBatch`.
        """
        ids, positions, slots, *sources = columns
        starts = np.zeros(len(states) + 1, dtype=np.int32)
        np.cumsum(counts, out=starts[1:])
        where = async_tensor_h2d(starts, device=ids.device)
        states_here = async_tensor_h2d(states.astype(np.int64), device=ids.device)
        batch = replace(
            self.step.batch,
            num_reqs=len(states),
            idx_mapping=states_here,
            idx_mapping_np=states,
            num_scheduled_tokens=counts,
            num_tokens=len(ids),
            num_draft_tokens=0,
            num_draft_tokens_per_req=None,
            query_start_loc=where,
            query_start_loc_np=starts,
            seq_lens_cpu_upper_bound=torch.from_numpy(ends),
            input_ids=ids,
            positions=positions,
            max_query_len=None,
        )
        none_rejected = torch.zeros_like(num_sampled)
        step = TargetStep(batch, none_rejected, ids, None, slots.T.contiguous())
        verified = self.verified._replace(
            input_ids=ids,
            positions=positions,
            query_start_loc=where,
            idx_mapping=states_here,
            num_sampled=num_sampled,
            num_rejected=none_rejected,
        )
        hidden = self.hidden and self.hidden._replace(sources=tuple(sources))
        return DraftInput(step, verified, hidden)


class Backlog:
    """Rows that the drafter has yet to process, in the order of steps.

    Args:
        max_rows: the most rows of a pass.
        max_num_reqs: R.

    Attributes:
        max_rows: the most rows that are kept.
        block_size: the smallest KV cache block size, in tokens; None without prefix
            caching.
    """

    block_size: int | None = None

    def __init__(self, max_rows: int, max_num_reqs: int):
        self.max_rows = max_rows
        # By row, the request state; -1 if the request has ended.
        self._states = np.full(max_rows, -1, dtype=np.int64)
        self._num_rows = 0
        # By request state, an upper bound of its length up to its last row.
        self._ends = np.zeros(max_num_reqs, dtype=np.int32)
        # [max_rows, ...] each, as `DraftInput.columns`; allocated on the first batch,
        # which has their widths.
        self._columns: list[torch.Tensor] = []
        self._sources: list[torch.Tensor] | None = None
        self._last: DraftInput | None = None  # of the last step, without its rows
        # Steps since the last one with drafts. The host learns the outcome of those
        # drafts one step late.
        self._undrafted_steps = 0

    def __bool__(self) -> bool:
        return self._num_rows > 0

    def reserve(self, sources: tuple[torch.Tensor, ...]) -> None:
        """Allocates the kept hidden states, as wide as `sources`; the rest is small."""
        self._sources = [
            rows.new_empty(self.max_rows, *rows.shape[1:]) for rows in sources
        ]

    def put(self, given: DraftInput) -> DraftInput | None:
        """Keeps the rows of decoding requests, in a step that drafts nothing.

        There must be room: see `is_due`.

        Returns:
            The rest of the step, which the drafter has to process now: requests with
            prompts, or with drafts to verify. None if nothing is left.
        """
        batch = given.step.batch
        if batch.num_draft_tokens_per_req is not None:
            self._undrafted_steps = 0
            return given  # if drafts were trimmed, the host does not know their rows
        self._undrafted_steps += 1
        waits = (batch.num_scheduled_tokens == 1) & ~batch.is_prefilling_np
        count = np.count_nonzero(waits)
        if not count:
            return given
        if count == batch.num_reqs:
            self._keep(given, slice(count))  # cheaper than with indices
            return None
        self._keep(given, np.flatnonzero(waits))
        return _part(given, np.flatnonzero(~waits))

    def drafts(self) -> None:
        """To be called in each step that drafts."""
        self._undrafted_steps = 0

    def _keep(self, given: DraftInput, waits: np.ndarray | slice) -> None:
        """Keeps the rows of the requests `waits`: indices, or a slice if all do."""
        batch, columns = given.step.batch, given.columns()
        states, begin = batch.idx_mapping_np[waits], self._num_rows
        rows_of: slice | torch.Tensor = slice(len(states))
        if not isinstance(waits, slice):
            starts = batch.query_start_loc_np[waits].astype(np.int64)
            rows_of = async_tensor_h2d(starts, device=columns[0].device)
        columns = [rows[rows_of] for rows in columns]
        if not self._columns:
            if self._sources is None:  # there was no profile run, as on a CPU
                self.reserve(tuple(columns[3:]))
            small = [r.new_empty(self.max_rows, *r.shape[1:]) for r in columns[:3]]
            self._columns = [*small, *self._sources]
        end = begin + len(states)
        for kept, rows in zip(self._columns, columns, strict=True):
            kept[begin:end] = rows
        self._states[begin:end], self._num_rows = states, end
        ends = batch.seq_lens_cpu_upper_bound.numpy()[: batch.num_reqs]
        self._ends[states] = ends[waits]
        self._last = given.without_rows()

    def take(self) -> DraftInput:
        """Removes and returns all rows; there must be some.

        To be called between steps, when the last sampled token of a request is the one
        after its last row.
        """
        states = self._states[: self._num_rows]
        order = np.argsort(states, kind="stable")
        order = order[np.count_nonzero(states < 0) :]
        states, counts = np.unique(states[order], return_counts=True)
        index = async_tensor_h2d(order, device=self._columns[0].device)
        columns = [rows.index_select(0, index) for rows in self._columns]
        sampled = columns[0].new_ones(len(states))
        ends = self._ends[states]
        taken = self._last.of_requests(
            columns, states, counts.astype(np.int32), ends, sampled
        )
        self._empty()
        return taken

    def _empty(self) -> None:
        self._num_rows, self._last = 0, None

    def is_due(
        self,
        num_reqs: int,
        drafts: bool,
        used: Set[int],
        num_cached: int = 0,
    ) -> bool:
        """Whether the kept rows have to be processed before a step.

        Args:
            num_reqs: of the step.
            drafts: whether it drafts, or verifies drafts.
            used: request states that are freed before it, or of which it computes
                several tokens.
            num_cached: the longest prefix cache hit of its new requests, in tokens.
        """
        if not self:
            return False
        if drafts or self._num_rows + num_reqs > self.max_rows:
            return True
        if num_cached and self._may_hold(num_cached):
            return True
        return self._num_rows_of(used) > 0

    def _num_rows_of(self, states: Set[int]) -> int:
        if not states:
            return 0
        kept = self._states[: self._num_rows]
        return np.count_nonzero(np.isin(kept, list(states)))

    def _may_hold(self, num_cached: int) -> bool:
        """Whether a prefix cache hit of `num_cached` tokens may include kept rows:
        blocks of a running request can be hit as soon as they are full."""
        states = self._states[: self._num_rows]
        states, counts = np.unique(states[states >= 0], return_counts=True)
        # Lower bounds of where they begin: some last drafts may have been rejected.
        begins = self._ends[states] - counts - MAX_NODES
        return self.block_size is not None and bool((begins < num_cached).any())

    def _may_be_found(self, state: int) -> bool:
        """Whether a request's rows complete a block, which other requests may hit in
        the prefix cache after it has ended."""
        if self.block_size is None:
            return False
        count, end = self._num_rows_of({state}), int(self._ends[state])
        is_filled = end // self.block_size > (end - count) // self.block_size
        return bool(is_filled) or self._undrafted_steps < 2

    def forget(self, ended: Iterable[int]) -> None:
        """Drops the rows of requests that have ended, if nobody needs their KV."""
        states = self._states[: self._num_rows]
        unneeded = [state for state in ended if not self._may_be_found(state)]
        states[np.isin(states, unneeded)] = -1
        if not (states >= 0).any():
            self._empty()


def first_rows(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """[sum(counts)] int64, the rows of requests: `counts` each, from `starts` on."""
    before = np.cumsum(counts, dtype=np.int64) - counts
    return np.repeat(starts - before, counts) + np.arange(counts.sum())


def _part(given: DraftInput, requests: np.ndarray) -> DraftInput:
    """Some requests of a step, by their indices in the batch."""
    batch = given.step.batch
    counts = batch.num_scheduled_tokens[requests]
    columns = given.columns()
    rows_of = first_rows(batch.query_start_loc_np[requests], counts)
    index = async_tensor_h2d(rows_of, device=columns[0].device)
    places = async_tensor_h2d(requests.astype(np.int64), device=columns[0].device)
    ends = batch.seq_lens_cpu_upper_bound.numpy()[requests]
    return given.of_requests(
        [rows.index_select(0, index) for rows in columns],
        batch.idx_mapping_np[requests],
        counts,
        ends,
        given.verified.num_sampled[places],
    )


def make_backlog(vllm_config: VllmConfig, drafter: Drafter) -> Backlog | None:
    """The backlog of an engine in which steps may draft nothing.

    Returns:
        None if rows cannot be kept, which is logged.
    """
    scheduler = vllm_config.scheduler_config
    rows = scheduler.max_num_batched_tokens
    why = _why_none(vllm_config, drafter)
    if why is not None:
        _say_why_none(why)
        return None
    if drafter.fed_hidden_size is not None:
        rows = min(rows, max(MAX_FED_ROWS, scheduler.max_num_seqs))
    return Backlog(rows, scheduler.max_num_seqs)


def _why_none(vllm_config: VllmConfig, drafter: Drafter) -> str | None:
    """Why rows cannot be kept; None if they can.

    Ranks in lockstep must all run the drafter; with pipeline stages, other steps may be
    in flight on earlier ones; KV that a connector sends must be complete.
    """
    parallel = vllm_config.parallel_config
    reasons = {
        "data parallelism": parallel.data_parallel_size > 1,
        "pipeline parallelism": parallel.pipeline_parallel_size > 1,
        "prefill context parallelism": parallel.prefill_context_parallel_size > 1,
        "KV connectors": vllm_config.kv_transfer_config is not None,
        "embeddings of images": drafter.takes_embeddings,
        "M-RoPE drafters": drafter.rope_dims > 0,
    }
    return next((what for what, is_there in reasons.items() if is_there), None)


def _say_why_none(what: str) -> None:
    logger.info(
        "The drafter runs in every step, even without drafts: skipping it does not "
        "support %s.",
        what,
    )


def for_kv_cache(
    backlog: Backlog | None, specs: Iterable[KVCacheSpec], block_size: int | None
) -> Backlog | None:
    """The backlog, once the KV cache config is known.

    A running request frees blocks that have left a sliding window, and workers are not
    told: KV of a kept row could be written over that of another request.

    Args:
        specs: of the drafter's KV groups.
        block_size: see `Backlog`.

    Returns:
        None if rows cannot be kept, which is logged.
    """
    if backlog is None:
        return None
    layers = [layer for spec in specs for layer in iter_layer_specs(spec)]
    if not all(map(_keeps_blocks, layers)):
        _say_why_none("drafters with sliding windows, or attention to chunks")
        return None
    backlog.block_size = block_size
    return backlog


def _keeps_blocks(spec: KVCacheSpec) -> bool:
    return isinstance(spec, FullAttentionSpec) and not isinstance(spec, RSWASpec)


def backlog_of(runner: "GPUModelRunner") -> Backlog | None:
    """None if the drafter runs in every step, or there is no drafter."""
    return getattr(runner.speculator, "backlog", None)


def catch_up(runner: "GPUModelRunner", step: "SchedulerOutput") -> None:
    """Processes the backlog before a step that needs it. To be called before the states
    of ended requests are freed."""
    backlog = backlog_of(runner)
    if not backlog:
        return
    states = runner.req_states.req_id_to_index
    names = step.finished_req_ids | (step.preempted_req_ids or set())
    ended = {states[name] for name in names if name in states}
    if ended:
        backlog.forget(ended)
    counts = step.num_scheduled_tokens
    more = {name for name, count in counts.items() if count > 1}
    # A streaming session that continues is a new request on the same blocks.
    more.update(new.req_id for new in step.scheduled_new_reqs)
    used = ended | {states[name] for name in more if name in states}
    found = (new.num_computed_tokens for new in step.scheduled_new_reqs)
    drafts = bool(step.num_spec_tokens_to_schedule or step.scheduled_spec_decode_tokens)
    if backlog.is_due(len(counts), drafts, used, max(found, default=0)):
        catch_up_now(runner)


def catch_up_now(runner: "GPUModelRunner") -> None:
    """Processes the backlog, between steps. Steps past a drafter's context add nothing
    to it."""
    if not backlog_of(runner):
        return
    with use_workspace_lane(runner._draft_workspace_lane):
        runner.speculator.catch_up()
