# SPDX-License-Identifier: Apache-2.0
"""What the drafter has yet to run over: rows of steps that drafted nothing.

A drafter whose KV cache is to be complete has to run over every token. In a step that
drafts nothing, a pass over one token of each request would take about as long as one
over many. So those rows are kept, with the hidden states that they are fed, and one
pass makes up for some steps: before a step that drafts, or once there are as many rows
as are kept. Drafts are the same as if the drafter had run in every step.

Rows of prompts are not kept: there are too many of them, and their pass pays by itself.
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

# Rows with hidden states that are kept: of three layers of an 8B model they take 50 MB.
# Passes over more take as long as they have rows.
MAX_FED_ROWS = 2048


class DraftInput(NamedTuple):
    """What a draft step is laid out from; `hidden` is None for drafters fed none."""

    step: TargetStep
    verified: VerifiedBatch
    hidden: HiddenRows | None

    def columns(self) -> list[torch.Tensor]:
        """What it has of each row: [at least T, ...] each."""
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
        """The same of other requests, without drafts.

        Args:
            columns: as `columns` returns them, of the requests' rows.
            states: [m], request states.
            counts: [m], rows of each.
            ends: [m] int32, upper bounds of tokens up to each one's last row.
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
    """Rows that the drafter has yet to run over, by request in the order of steps.

    Args:
        max_rows: the most that a pass runs over.
        max_num_reqs: R.

    Attributes:
        max_rows: that are kept.
        block_size: tokens of the smallest KV block that other requests may find by its
            prefix; None if they find none.
    """

    block_size: int | None = None

    def __init__(self, max_rows: int, max_num_reqs: int):
        self.max_rows = max_rows
        # By row, the request state; -1: it has ended.
        self._states = np.full(max_rows, -1, dtype=np.int64)
        self._num_rows = 0
        # By request state, an upper bound of its tokens up to its last row.
        self._ends = np.zeros(max_num_reqs, dtype=np.int32)
        # [max_rows, ...] each, as `DraftInput.columns`; only the first batch tells how
        # wide they are.
        self._columns: list[torch.Tensor] = []
        self._sources: list[torch.Tensor] | None = None
        self._last: DraftInput | None = None  # of the last step, without its rows
        # How many steps there were since the last one with drafts. The host learns with
        # a delay of one what those came to.
        self._undrafted_steps = 0

    def __bool__(self) -> bool:
        return self._num_rows > 0

    def reserve(self, sources: tuple[torch.Tensor, ...]) -> None:
        """Allocates what is kept of hidden states like these; the rest is small."""
        self._sources = [
            rows.new_empty(self.max_rows, *rows.shape[1:]) for rows in sources
        ]

    def put(self, given: DraftInput) -> DraftInput | None:
        """Keeps the rows of requests that decode, in a step that drafts nothing.

        There must be room: see `is_due`.

        Returns:
            What is left of the step for the drafter to run over now: requests with
            prompts, or with drafts to verify.
        """
        batch = given.step.batch
        if batch.num_draft_tokens_per_req is not None:
            self._undrafted_steps = 0
            return given  # the host may not know how many rows each has
        self._undrafted_steps += 1
        waits = (batch.num_scheduled_tokens == 1) & ~batch.is_prefilling_np
        count = np.count_nonzero(waits)
        if not count:
            return given
        if count == batch.num_reqs:
            self._keep(given, slice(count))  # what a mask would find costs more
            return None
        self._keep(given, waits)
        return _part(given, np.flatnonzero(~waits))

    def drafts(self) -> None:
        """To be told of a step that drafts."""
        self._undrafted_steps = 0

    def _keep(self, given: DraftInput, waits: np.ndarray | slice) -> None:
        """Args: `waits` says which requests of the step; a slice, that all do."""
        batch, columns = given.step.batch, given.columns()
        states, begin = batch.idx_mapping_np[waits], self._num_rows
        rows_of: slice | torch.Tensor = slice(len(states))
        if not isinstance(waits, slice):
            # Of a batch that is padded for a CUDA graph there are more.
            starts = batch.query_start_loc_np[: batch.num_reqs][waits].astype(np.int64)
            rows_of = async_tensor_h2d(starts, device=columns[0].device)
        columns = [rows[rows_of] for rows in columns]
        if not self._columns:
            if self._sources is None:  # nothing was profiled, as on a CPU
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
        """All rows, which are not kept any longer; there must be some.

        To be called between steps: what a request sampled last is behind its last row.
        """
        states = self._states[: self._num_rows]
        order = np.argsort(states, kind="stable")
        order = order[np.count_nonzero(states < 0) :]
        states, counts = np.unique(states[order], return_counts=True)
        index = async_tensor_h2d(order, device=self._columns[0].device)
        columns = [rows[index] for rows in self._columns]
        sampled = columns[0].new_ones(len(states))
        ends = self._ends[states]
        taken = self._last.of_requests(
            columns, states, counts.astype(np.int32), ends, sampled
        )
        self._num_rows, self._last = 0, None
        return taken

    def is_due(
        self,
        num_reqs: int,
        drafts: bool,
        prompts: Set[int],
        ended: Set[int],
        num_cached: int = 0,
    ) -> bool:
        """Whether a step cannot go on without a pass over the rows that are kept.

        Args:
            num_reqs: of the step.
            drafts: whether it drafts, or verifies drafts.
            prompts: request states of which it computes several tokens.
            ended: request states that are given up before it.
            num_cached: the most tokens that a new request finds in the KV cache.
        """
        if not self:
            return False
        if drafts or self._num_rows + num_reqs > self.max_rows:
            return True
        if num_cached and self._may_hold(num_cached):
            return True
        if not prompts and not ended:
            return False
        states = set(self._states[: self._num_rows].tolist())
        return not states.isdisjoint(prompts) or any(
            self._may_be_found(state) for state in ended & states
        )

    def _may_hold(self, num_cached: int) -> bool:
        """Whether so many tokens that were found may be of a request that runs, and
        reach up to its rows: its blocks may be found as soon as they are full."""
        states = self._states[: self._num_rows]
        states, counts = np.unique(states[states >= 0], return_counts=True)
        # Where they begin at least: of its last drafts some may have been rejected.
        begins = self._ends[states] - counts - MAX_NODES
        return self.block_size is not None and bool((begins < num_cached).any())

    def _may_be_found(self, state: int) -> bool:
        """Whether a request's rows fill a block, which other requests may go on behind
        once it has ended."""
        if self.block_size is None:
            return False
        count = np.count_nonzero(self._states[: self._num_rows] == state)
        end = int(self._ends[state])
        is_filled = end // self.block_size > (end - count) // self.block_size
        return bool(is_filled) or self._undrafted_steps < 2

    def forget(self, ended: Set[int]) -> None:
        """Requests have ended: nobody goes on behind their rows."""
        states = self._states[: self._num_rows]
        states[np.isin(states, list(ended))] = -1
        if not (states >= 0).any():
            self._num_rows, self._last = 0, None


def _part(given: DraftInput, requests: np.ndarray) -> DraftInput:
    """Some requests of a step, by their places in the batch."""
    batch = given.step.batch
    counts = batch.num_scheduled_tokens[requests]
    starts = batch.query_start_loc_np[requests].astype(np.int64)
    before = np.cumsum(counts) - counts
    rows_of = np.repeat(starts - before, counts) + np.arange(counts.sum())
    columns = given.columns()
    index = async_tensor_h2d(rows_of, device=columns[0].device)
    places = async_tensor_h2d(requests.astype(np.int64), device=columns[0].device)
    ends = batch.seq_lens_cpu_upper_bound.numpy()[requests]
    return given.of_requests(
        [rows[index] for rows in columns],
        batch.idx_mapping_np[requests],
        counts,
        ends,
        given.verified.num_sampled[places],
    )


def make_backlog(vllm_config: VllmConfig, drafter: Drafter) -> Backlog | None:
    """Of an engine in which steps may draft nothing.

    Returns:
        None where rows cannot be kept; one line says so then.
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
    """Ranks in step with each other all run the drafter; other steps may be under way
    on stages before this one; and KV that is sent elsewhere must be complete."""
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
        "The drafter runs in every step, drafting or not: leaving it out does not "
        "support %s.",
        what,
    )


def for_kv_cache(
    backlog: Backlog | None, specs: Iterable[KVCacheSpec], block_size: int | None
) -> Backlog | None:
    """Once the KV cache is known.

    A request that runs gives blocks back that windows have left behind, and workers are
    not told: a row that waited would be written where another request's KV is by now.

    Args:
        specs: of the drafter's KV groups.
        block_size: see `Backlog`.

    Returns:
        None where rows cannot be kept; one line says so then.
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
    """None where the drafter runs in every step, or nothing drafts."""
    return getattr(runner.speculator, "backlog", None)


def catch_up(runner: "GPUModelRunner", step: "SchedulerOutput") -> None:
    """Before a step that cannot go on without it, has the drafter run over what it left
    out. To be called before the states of requests that ended are given up."""
    backlog = backlog_of(runner)
    if not backlog:
        return
    states = runner.req_states.req_id_to_index
    names = step.finished_req_ids | (step.preempted_req_ids or set())
    ended = {states[name] for name in names if name in states}
    counts = step.num_scheduled_tokens
    more = {name for name, count in counts.items() if count > 1}
    # A session that is answered goes on as a new request, behind the same blocks.
    more.update(new.req_id for new in step.scheduled_new_reqs)
    prompts = {states[name] for name in more if name in states}
    found = (new.num_computed_tokens for new in step.scheduled_new_reqs)
    drafts = bool(step.num_spec_tokens_to_schedule or step.scheduled_spec_decode_tokens)
    if backlog.is_due(len(counts), drafts, prompts, ended, max(found, default=0)):
        catch_up_now(runner)
    if ended:
        backlog.forget(ended)


def catch_up_now(runner: "GPUModelRunner") -> None:
    """To be called between steps. Past a drafter's context nothing was left out."""
    if not backlog_of(runner):
        return
    with use_workspace_lane(runner._draft_workspace_lane):
        runner.speculator.catch_up()
