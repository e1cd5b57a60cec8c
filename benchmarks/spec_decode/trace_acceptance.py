# SPDX-License-Identifier: Apache-2.0
"""Replays a recording inside an engine: draft probabilities, and what is accepted.

All implementations have the recording in tensors on their device, and look it up by

    row = (start + position) % num_rows

A request's `start` is derived from the first tokens of its prompt, so that it accepts
the same on every implementation. `position` is that of its newest token, which is the
first row of a step that verifies drafts. The recorded texts are concatenated: a request
that reaches the end of a text continues with the next one.
Nothing here synchronizes with the device, and all buffers keep their addresses, so the
lookups can be part of CUDA graphs.
"""

from importlib import import_module
from typing import Any

import numpy as np
import torch

from benchmarks.spec_decode.traces import NO_RANK, Trace

# Runner V2, Runner V1, and Runner V1 for a CPU, which overrides load_model.
RUNNERS = (
    ("vllm.v1.worker.gpu.model_runner", "GPUModelRunner"),
    ("vllm.v1.worker.gpu_model_runner", "GPUModelRunner"),
    ("vllm.v1.worker.cpu_model_runner", "CPUModelRunner"),
)
CAPACITY = 1 << 14
DEPTH, WIDTH = 8, 16
# Prompt tokens that determine a request's start, and the distance between the starts of
# prompts whose token sums differ by one.
KEY_TOKENS, SPREAD = 8, 613
# With trees, candidates and sampled tokens are replaced by FIRST_TOKEN + rank, so that
# no draft is accepted by chance.
FIRST_TOKEN = 16
SMALL_VOCAB = 128


class Replay:
    """A recording's tables on a device.

    Attributes:
        probs: [CAPACITY, DEPTH, WIDTH] float32, of the most likely tokens by depth.
        ranks: [CAPACITY, DEPTH] int32, rank of the target's token among them, or
            NO_RANK.
        chain: [CAPACITY] int64, accepted drafts of a chain of DEPTH.
        num_rows: [1] int64, rows of the tables that are in use.
        starts: [slots] int64, by a request's index in Runner V2's state.
    """

    def __init__(self, device: torch.device | str, num_slots: int) -> None:
        shape = CAPACITY, DEPTH, WIDTH
        self.probs = torch.zeros(shape, device=device)
        self.ranks = torch.zeros(shape[:2], dtype=torch.int32, device=device)
        self.chain = torch.zeros(CAPACITY, dtype=torch.int64, device=device)
        self.num_rows = torch.ones(1, dtype=torch.int64, device=device)
        self.starts = torch.zeros(num_slots, dtype=torch.int64, device=device)

    def load(self, trace: Trace) -> None:
        rows, depth, width = trace.probs.shape
        assert rows <= CAPACITY and depth == DEPTH and width <= WIDTH
        ranks = torch.from_numpy(trace.ranks.astype("int32"))
        self.probs.zero_()
        self.probs[:rows, :, :width].copy_(torch.from_numpy(trace.probs))
        self.ranks[:rows].copy_(ranks)
        self.chain[:rows].copy_((ranks == 0).cumprod(1).sum(1))
        self.num_rows.fill_(rows)

    def rows(self, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Table rows, [n] int64, of requests by slot and their newest position."""
        return self.rows_from(self.starts[slots], positions)

    def rows_from(self, starts: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The same for requests that begin at `starts`, [n] int64."""
        return (starts + positions) % self.num_rows

    def confident_logits(
        self, rows: torch.Tensor, depths: torch.Tensor
    ) -> torch.Tensor:
        """[n, SMALL_VOCAB] logits whose best token is as likely as the recorded one.

        Args:
            rows: [n].
            depths: [n] of the draft, from 0 on; from DEPTH on no token is likely.
        """
        known = self.probs[rows, depths.clamp(max=DEPTH - 1), 0]
        likely = torch.where(depths < DEPTH, known, 0.0)
        likely = likely.clamp(1.5 / SMALL_VOCAB, 1 - 1e-6)
        logits = likely.new_zeros(len(rows), SMALL_VOCAB)
        logits[:, 0] = (likely / (1 - likely) * (SMALL_VOCAB - 1)).log()
        return logits


def start_of(prompts: np.ndarray) -> np.ndarray:
    """Where requests begin in a recording, [n] int64, from [n, >= 8] token ids."""
    return prompts[:, :KEY_TOKENS].sum(1, dtype=np.int64) * SPREAD


def replay_in_every_runner(name: str | None = None) -> list[Replay]:
    """Patches the model runners of this process to replay a recording.

    Call it before the engine is created. It works for this tree and vLLM's release.

    Args:
        name: of the recording; None loads none yet.

    Returns:
        A list that gets the tables of each runner when it loads its model.
    """
    made: list[Replay] = []
    for module, kind in RUNNERS:
        runner = getattr(import_module(module), kind)
        runner.load_model = _loading(runner.load_model, name, made)
    return made


def _loading(load_model: Any, name: str | None, made: list[Replay]) -> Any:
    def loading(runner, *args, **kwargs):
        load_model(runner, *args, **kwargs)
        config = runner.vllm_config
        if config.speculative_config is None:
            return
        replay = Replay(runner.device, config.scheduler_config.max_num_seqs)
        if hasattr(runner, "req_states"):
            runner.add_requests = _starting(runner.add_requests, runner, replay)
        if getattr(config.speculative_config, "draft_tree", None):
            replay_trees(replay)
        else:
            replay_chains(runner, replay)
        if getattr(config.speculative_config, "enable_adaptive_verification", False):
            replay_confidence(replay)
        if name is not None:
            replay.load(Trace.load(name))
        made.append(replay)

    return loading


def _starting(add_requests: Any, runner: Any, replay: Replay) -> Any:
    """Stores the start of new requests on Runner V2, where requests keep their index.

    On Runner V1 they move, and starts are computed in every step.
    """

    def starting(scheduler_output):
        add_requests(scheduler_output)
        for new in scheduler_output.scheduled_new_reqs:
            slot = runner.req_states.req_id_to_index[new.req_id]
            start = start_of(np.array([new.prompt_token_ids]))
            replay.starts[slot].fill_(int(start[0]))

    return starting


def replay_chains(runner: Any, replay: Replay) -> None:
    """Makes Runner V1 or V2 accept chains as recorded.

    The token after the last accepted one is a draft too, which is as good as any with
    dummy weights. Runner V2 must use synthetic acceptance: its rates are set to 1, and
    what the recording rejects is cut off. Runner V1 need not, and cannot on a CPU.
    """
    sampler = runner.rejection_sampler
    if not hasattr(sampler, "_verify"):
        sampler.forward = _v1_forward(sampler.forward, runner, replay)
        return
    if sampler.synthetic_conditional_rates is None:
        raise ValueError('start the engine with rejection_sample_method="synthetic"')
    sampler.synthetic_conditional_rates.fill_(1.0)
    sampler._verify = _v2_verify(sampler._verify, replay)


def _v2_verify(verify: Any, replay: Replay) -> Any:
    def replayed(logits, draft_logits, drafts, positions, starts, slots, *args):
        processed, sampled, num_sampled = verify(
            logits, draft_logits, drafts, positions, starts, slots, *args
        )
        begin, end = starts[:-1], starts[1:]
        rows = replay.rows(slots, positions[begin])
        accepted = torch.minimum(replay.chain[rows], end - begin - 1)
        cut = torch.minimum(num_sampled, accepted + 1).to(num_sampled.dtype)
        return processed, sampled, cut

    return replayed


def _v1_forward(forward: Any, runner: Any, replay: Replay) -> Any:
    def replayed(metadata, draft_probs, logits, sampling_metadata):
        output = forward(metadata, draft_probs, logits, sampling_metadata)
        tokens = output.sampled_token_ids  # [n, max drafts + 1], -1 after the last
        ends, drafts = metadata.cu_num_sampled_tokens, metadata.draft_token_ids
        begins = torch.nn.functional.pad(ends[:-1], (1, 0))
        positions = runner.positions[metadata.logits_indices[begins]]
        prompts = runner.input_batch.token_ids_cpu[: len(tokens)]
        starts = torch.from_numpy(start_of(prompts)).to(tokens.device)
        recorded = replay.chain[replay.rows_from(starts, positions)]
        accepted = torch.minimum(recorded, ends - begins - 1)
        requests = torch.arange(len(tokens), device=tokens.device)
        places = torch.arange(tokens.shape[1], device=tokens.device)
        if len(drafts):  # each earlier request has one draft less than rows
            own = (begins - requests)[:, None] + places
            drafted = drafts[own.clamp(max=len(drafts) - 1)].to(tokens.dtype)
            tokens.copy_(torch.where(tokens < 0, drafted, tokens))
        tokens.masked_fill_(places > accepted[:, None], -1)
        return output

    return replayed


def replay_confidence(replay: Replay) -> None:
    """Makes adaptive verification use the confidence of the recorded drafter.

    Call it before an engine captures CUDA graphs. The estimator still processes the
    logits of each draft, so that a step does all of its work, and then the recorded
    ones.
    """
    from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator

    base = DraftModelSpeculator
    base.sample_draft = _placed(base.sample_draft)
    base._maybe_predict_acceptance = _confident(base._maybe_predict_acceptance, replay)


def _placed(sample_draft: Any) -> Any:
    def placed(self, hidden_states, positions, *args, **kwargs):
        self.recorded_positions = positions  # one before the draft's own
        return sample_draft(self, hidden_states, positions, *args, **kwargs)

    return placed


def _confident(predict: Any, replay: Replay) -> Any:
    def replayed(self, logits, slots, draft_step):
        predict(self, logits, slots, draft_step)
        newest = (self.recorded_positions - draft_step).clamp(min=0)
        rows = replay.rows(slots.clamp(min=0).long(), newest)
        recorded = replay.confident_logits(rows, draft_step.expand(len(rows)))
        predict(self, recorded, slots, draft_step)

    return replayed


def replay_trees(replay: Replay) -> None:
    """Makes engines of this process draft and accept trees as recorded.

    Call it before an engine captures CUDA graphs. Candidates are still ranked, and
    tokens sampled, so that a step does all of its work; the results are then replaced.
    """
    from vllm.v1.worker.gpu.spec_decode.unified.sampler import DraftSampler
    from vllm.v1.worker.gpu.spec_decode.unified.tree.verify import TreeRejectionSampler

    sampler, tree_sampler = DraftSampler, TreeRejectionSampler
    sampler.sample_chain = _sampled(sampler.sample_chain)
    sampler.sample_tree = _in_pass(sampler.sample_tree)
    sampler.rank_candidates = _ranked(sampler.rank_candidates, replay)
    tree_sampler._draw = _drawn(tree_sampler._draw, replay)


def _sampled(sample_chain: Any) -> Any:
    def replayed(sampler, hidden, plan, draft_pass):
        sample_chain(sampler, hidden, plan, draft_pass)
        # The best candidate of each position.
        sampler.drafts[: len(hidden), : plan.num_drafts] = FIRST_TOKEN

    return replayed


def _in_pass(sample_tree: Any) -> Any:
    def replayed(sampler, hidden, plan, draft_pass):
        sampler.recorded_pass = draft_pass
        sample_tree(sampler, hidden, plan, draft_pass)

    return replayed


def _ranked(rank_candidates: Any, replay: Replay) -> Any:
    def replayed(sampler, hidden, plan):
        log_probs, tokens = rank_candidates(sampler, hidden, plan)
        n, samples = hidden.shape[:2]
        first = sampler.recorded_pass * samples
        batch, width = sampler.inputs.batch, log_probs.shape[1]
        if first + samples > DEPTH or width > WIDTH:
            raise ValueError(
                f"{width} candidates at {first + samples} depths, but recordings hold "
                f"{WIDTH} at {DEPTH}: draft at most {DEPTH} tokens deep"
            )
        newest = batch.sample_positions[: n * samples : samples] - first
        rows = replay.rows(batch.idx_mapping[:n].clamp(min=0), newest.clamp(min=0))
        # As in `best_candidates`.
        probs = replay.probs[rows, first : first + samples, :width]
        probs = probs / probs.sum(-1, keepdim=True)
        log_probs.copy_(probs.log().view(-1, width))
        ranks = torch.arange(width, device=tokens.device)
        tokens.copy_((FIRST_TOKEN + ranks).expand_as(tokens))
        return log_probs, tokens

    return replayed


def _drawn(draw: Any, replay: Replay) -> Any:
    def replayed(self, logits, nodes, pos, states, local_pos):
        own = draw(self, logits, nodes, pos, states, local_pos)
        depths = local_pos
        if self.has_trees:
            node = (local_pos - 1).clamp(min=0).long()
            depths = torch.where(local_pos > 0, self.trees.depths[states, node], 0)
        rows = replay.rows(states, pos - depths)
        # The token of the recorded rank, or a token that is no candidate.
        ranks = replay.ranks[rows, depths.clamp(max=DEPTH - 1)]
        ranks = torch.where(depths < DEPTH, ranks, NO_RANK)
        return (FIRST_TOKEN + ranks).to(own.dtype)

    return replayed
