# SPDX-License-Identifier: Apache-2.0
"""How many tokens data-parallel ranks draft that run in lockstep.

Their experts exchange tokens in every pass, and a rank without requests joins in with
dummy batches, so all must run equally many draft passes. Every rank proposes a length
whenever the ranks synchronize on whether any has unfinished requests, at the same step
of each. Until the next time all draft what the rank with the most requests proposed: it
has the most tokens to gain, and the others wait for its steps.
"""

from typing import TYPE_CHECKING

import torch
from torch.distributed import ReduceOp

if TYPE_CHECKING:
    from vllm.v1.core.sched.draft_policy import DraftPolicy
    from vllm.v1.engine.core import DPEngineCoreProc, EngineCore
    from vllm.v1.worker.worker_base import WorkerBase

MOST_DRAFTS = 1 << 16  # more than any number of drafts of a request


def _policy_of(engine: "EngineCore") -> "DraftPolicy | None":
    """None if the engine does not choose, as with a custom scheduler."""
    step_drafts = getattr(engine.scheduler, "step_drafts", None)
    return None if step_drafts is None else step_drafts.policy


def agree_on_drafts(engine: "DPEngineCoreProc") -> None:
    """Called by all ranks at once."""
    if (policy := _policy_of(engine)) is None:
        return
    num_reqs, length = policy.proposed_length()
    ranked = torch.tensor([num_reqs * MOST_DRAFTS + length], dtype=torch.int64)
    torch.distributed.all_reduce(ranked, op=ReduceOp.MAX, group=engine.dp_group)
    policy.agreed = int(ranked) % MOST_DRAFTS


def draft_as_agreed(engine: "EngineCore") -> None:
    """Called before a dummy batch, which has to draft as the other ranks do."""
    policy = _policy_of(engine)
    if policy is None or policy.agreed in (None, policy.idle_drafts):
        return
    engine.model_executor.collective_rpc(set_idle_drafts, args=(policy.agreed,))
    policy.idle_drafts = policy.agreed


def set_idle_drafts(worker: "WorkerBase", num_drafts: int) -> None:
    """Has dummy batches verify and draft `num_drafts` tokens from now on."""
    worker.model_runner.idle_drafts = num_drafts
