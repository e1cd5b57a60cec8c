# SPDX-License-Identifier: Apache-2.0
"""Replays a recording inside an engine: what is drafted, and what is accepted.

All implementations have the recording in tensors on their device, and look it up by

    row = (start + position) % num_rows

A request's `start` is derived from the first tokens of its prompt, so that it accepts
the same on every implementation. `position` is that of its newest token, which is the
first row of a step that verifies drafts. The recorded texts are concatenated: a request
that reaches the end of a text continues with the next one.

The recorded tree is planted where the drafter's own was grown, so any drafter does all
of its work. Its nodes, and what the target draws at each of them, are tokens that tell
which node is meant. Nothing here synchronizes with the device.
"""

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from benchmarks.spec_decode.traces import NO_NODE, Trace

MAX_NODES = 63
# Prompt tokens that determine a request's start, and the distance between the starts of
# prompts whose token sums differ by one.
KEY_TOKENS, SPREAD = 8, 613
# The token of node n is FIRST_TOKEN + n; FIRST_TOKEN is drawn where none is accepted.
FIRST_TOKEN = 16


def plants_of(
    trace: Trace, depth: int, is_tree: bool, device: torch.device | str
) -> list[torch.Tensor]:
    """Recorded trees of this depth, or chains of this length, on a device.

    Returns:
        [rows, nodes + 1] int64, the target's tokens at the newest token and at each
        node; of trees also parents, depths and ranks, [rows, nodes] int32 each, of
        `DraftTrees`.
    """
    if is_tree:
        trace = trace.within(depth)
        path, num_nodes = trace.path, trace.parents.shape[1]
    else:
        steps, num_nodes = np.arange(1, depth + 1), depth
        path = np.where(steps <= trace.chain[:, None], steps, NO_NODE)
    rows = np.arange(len(path))
    after, at = np.zeros((len(path), num_nodes + 1), np.int64), np.zeros_like(rows)
    for child in path.T:
        goes_on = child != NO_NODE
        after[rows[goes_on], at[goes_on]] = child[goes_on]
        at = np.where(goes_on, child, at)
    tables = [FIRST_TOKEN + after]
    if is_tree:
        parents = np.where(trace.parents == NO_NODE, -1, trace.parents.astype(int))
        topology = parents, np.maximum(trace.depths[:, 1:], 1), trace.ranks
        tables += [each.astype(np.int32) for each in topology]
    return [torch.from_numpy(each).to(device) for each in tables]


class Replay:
    """A recording's tables on a device.

    Attributes:
        trace: the recording; None: what is drafted is left alone.
        kinds: of steps, arguments of `plants_of`; made when a recording is loaded.
        chain: [rows] int64, accepted drafts of the longest chain.
        starts: [slots] int64, by a request's index in Runner V2's state.
        drawn: [slots, MAX_NODES + 1] int64, the target's tokens at a request's drafts.
    """

    trace: Trace | None = None

    def __init__(self, device: torch.device | str, num_slots: int) -> None:
        self.chain = torch.zeros(1, dtype=torch.int64, device=device)
        self.starts = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self.drawn = self.starts.new_full((num_slots, MAX_NODES + 1), FIRST_TOKEN)
        self._tokens = FIRST_TOKEN + 1 + torch.arange(MAX_NODES, device=device)
        self.kinds: set[tuple[int, bool]] = set()

    def load(self, trace: Trace) -> None:
        self.trace, device = trace, self.starts.device
        self.chain = torch.from_numpy(trace.chain.astype(np.int64)).to(device)
        self._plants = {kind: plants_of(trace, *kind, device) for kind in self.kinds}

    def plant(
        self,
        slots: torch.Tensor,
        newest: torch.Tensor,
        drafts: torch.Tensor,
        trees: Any,
        depth: int,
    ) -> None:
        """Replaces what requests draft.

        Args:
            slots, newest: [n], of each request, and the position of its newest token.
            drafts: [n, nodes, or length of a chain], written.
            trees: `DraftTrees`, written if there are more nodes than `depth`.
            depth: the most drafts that can be accepted.
        """
        size = drafts.shape[1]
        if (kind := (depth, size > depth)) not in self._plants:
            self._plants[kind] = plants_of(self.trace, *kind, drafts.device)
        planted, *topology = self._plants[kind]
        rows = self.rows(self.starts[slots], newest)
        drafts.copy_(self._tokens[:size])
        self.drawn[slots, : size + 1] = planted[rows, : size + 1]
        own = trees.parents, trees.depths, trees.ranks
        for table, planted in zip(own, topology, strict=False):
            table[slots, :size] = planted[rows, :size]

    def rows(self, starts: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Table rows, [n] int64, of requests by their start and newest position."""
        return (starts + positions) % len(self.chain)


def start_of(prompts: np.ndarray) -> np.ndarray:
    """Where requests begin in a recording, [n] int64, from [n, >= 8] token ids."""
    return prompts[:, :KEY_TOKENS].sum(1, dtype=np.int64) * SPREAD


def replacing(owner: Any, name: str) -> Callable[[Callable[..., Any]], None]:
    """Puts the function that follows in place of a function or method, which it gets as
    its first argument."""

    def put(function: Callable[..., Any]) -> None:
        original = getattr(owner, name)

        def replaced(*args, **kwargs):
            return function(original, *args, **kwargs)

        setattr(owner, name, replaced)

    return put


def replay_in(runner: Any) -> Replay:
    """Makes a model runner replay recordings, of this tree or of vLLM's release."""
    config = runner.vllm_config
    replay = Replay(runner.device, config.scheduler_config.max_num_seqs)
    if hasattr(runner, "req_states"):
        store_starts(runner, replay)
    if getattr(config.speculative_config, "draft_tree", None):
        replay_trees(runner.speculator, replay)
    else:
        replay_chains(runner, replay)
    return replay


def store_starts(runner: Any, replay: Replay) -> None:
    """Stores the start of new requests on Runner V2, where requests keep their index.

    On Runner V1 they move, and starts are computed in every step.
    """

    @replacing(runner, "add_requests")
    def starting(add_requests, scheduler_output):
        add_requests(scheduler_output)
        for new in scheduler_output.scheduled_new_reqs:
            slot = runner.req_states.req_id_to_index[new.req_id]
            start = start_of(np.array([new.prompt_token_ids]))
            replay.starts[slot].fill_(int(start[0]))


def replay_chains(runner: Any, replay: Replay) -> None:
    """Makes Runner V1 or V2 accept chains as recorded.

    The token after the last accepted one is a draft too, which is as good as any with
    dummy weights. Runner V2 must use synthetic acceptance: its rates are set to 1, and
    what the recording rejects is cut off. Runner V1 need not, and cannot on a CPU.
    """
    sampler = runner.rejection_sampler
    if not hasattr(sampler, "_verify"):
        replay_on_v1(runner, replay)
        return
    if sampler.synthetic_conditional_rates is None:
        raise ValueError('start the engine with rejection_sample_method="synthetic"')
    sampler.synthetic_conditional_rates.fill_(1.0)

    @replacing(sampler, "_verify")
    def replayed(verify, logits, draft_logits, drafts, positions, starts, slots, *args):
        processed, sampled, num_sampled = verify(
            logits, draft_logits, drafts, positions, starts, slots, *args
        )
        begin, end = starts[:-1], starts[1:]
        rows = replay.rows(replay.starts[slots], positions[begin])
        accepted = torch.minimum(replay.chain[rows], end - begin - 1)
        cut = torch.minimum(num_sampled, accepted + 1).to(num_sampled.dtype)
        return processed, sampled, cut


def replay_on_v1(runner: Any, replay: Replay) -> None:
    @replacing(runner.rejection_sampler, "forward")
    def replayed(forward, metadata, draft_probs, logits, sampling_metadata):
        output = forward(metadata, draft_probs, logits, sampling_metadata)
        tokens = output.sampled_token_ids  # [n, max drafts + 1], -1 after the last
        ends, drafts = metadata.cu_num_sampled_tokens, metadata.draft_token_ids
        begins = torch.nn.functional.pad(ends[:-1], (1, 0))
        positions = runner.positions[metadata.logits_indices[begins]]
        prompts = runner.input_batch.token_ids_cpu[: len(tokens)]
        starts = torch.from_numpy(start_of(prompts)).to(tokens.device)
        recorded = replay.chain[replay.rows(starts, positions)]
        accepted = torch.minimum(recorded, ends - begins - 1)
        requests = torch.arange(len(tokens), device=tokens.device)
        places = torch.arange(tokens.shape[1], device=tokens.device)
        if len(drafts):  # each earlier request has one draft less than rows
            own = (begins - requests)[:, None] + places
            drafted = drafts[own.clamp(max=len(drafts) - 1)].to(tokens.dtype)
            tokens.copy_(torch.where(tokens < 0, drafted, tokens))
        tokens.masked_fill_(places > accepted[:, None], -1)
        return output


def replay_trees(speculator: Any, replay: Replay) -> None:
    """Makes an engine draft and accept trees, and chains, as recorded.

    Its own are still grown, and the target's tokens drawn, so that a step does all of
    its work; the results are then replaced.
    """
    from vllm.config.drafter.length import chosen_lengths, depth_of, is_auto
    from vllm.v1.worker.gpu.spec_decode.unified.tree.verify import TreeRejectionSampler

    config = speculator.speculative_config
    sizes = chosen_lengths(config) if is_auto(config) else [config.draft_tree]
    depths = {size: depth_of(config, size) for size in sizes if size}
    replay.kinds = {(depth, size > depth) for size, depth in depths.items()}

    def plant(given: dict[str, Any], drafts: torch.Tensor) -> None:
        batch, size = given["input_batch"], given.get("num_speculative_tokens")
        if replay.trace is None or size == 0 or given.get("dummy_run"):
            return
        first = batch.logits_indices[batch.cu_num_logits[: batch.num_reqs]]
        newest = batch.positions[first] + given["num_sampled"][: batch.num_reqs]
        size = drafts.shape[1] if size is None else size
        slots, trees = batch.idx_mapping[: batch.num_reqs], speculator.tree_step
        depth = depth_of(config, size)
        replay.plant(slots, newest, drafts[:, :size], trees.trees, depth)

    after_propose(speculator, plant)

    @replacing(TreeRejectionSampler, "_draw")
    def drawn(draw, self, logits, nodes, pos, states, local_pos, states_np):
        own = draw(self, logits, nodes, pos, states, local_pos, states_np)
        return replay.drawn[states, local_pos].to(own.dtype)


def after_propose(
    speculator: Any, act: Callable[[dict[str, Any], torch.Tensor], None]
) -> None:
    """Calls `act` with the arguments of each `propose` by name, and its drafts."""
    signature = inspect.signature(speculator.propose)

    @replacing(speculator, "propose")
    def followed(propose, *args, **kwargs):
        drafts = propose(*args, **kwargs)
        act(signature.bind(*args, **kwargs).arguments, drafts)
        return drafts
