# SPDX-License-Identifier: Apache-2.0
"""How many tokens data-parallel ranks draft that run in lockstep.

Their experts exchange tokens in every pass, and a rank without requests joins in with
dummy batches, so all must run equally many draft passes. Every rank says what it would
draft whenever the ranks synchronize on whether any has unfinished requests, at the same
step of each. Until the next time all draft what the rank with the most requests would:
it has the most tokens to gain, and the others wait for its steps.
"""

from typing import TYPE_CHECKING

import torch
from torch.distributed import ReduceOp

if TYPE_CHECKING:
    from vllm.v1.engine.core import DPEngineCoreProc, EngineCore
    from vllm.v1.worker.worker_base import WorkerBase

MOST_DRAFTS = 1 << 16  # more than any number of drafts of a request


def agree_on_drafts(engine: "DPEngineCoreProc") -> None:
    """Called by all ranks at once. A custom scheduler does not choose draft lengths."""
    chosen = getattr(engine.scheduler, "draft_lengths", None)
    if chosen is None:
        return
    num_reqs, wish = chosen.wish()
    ranked = torch.tensor([num_reqs * MOST_DRAFTS + wish], dtype=torch.int64)
    torch.distributed.all_reduce(ranked, op=ReduceOp.MAX, group=engine.dp_group)
    chosen.agreed = int(ranked) % MOST_DRAFTS


def draft_as_agreed(engine: "EngineCore") -> None:
    """Called before a dummy batch, which has to draft as the other ranks do."""
    chosen = getattr(engine.scheduler, "draft_lengths", None)
    if chosen is None or chosen.agreed in (None, chosen.told):
        return
    engine.model_executor.collective_rpc(set_idle_drafts, args=(chosen.agreed,))
    chosen.told = chosen.agreed


def set_idle_drafts(worker: "WorkerBase", num_drafts: int) -> None:
    """Has dummy batches verify and draft `num_drafts` tokens from now on."""
    worker.model_runner.idle_drafts = num_drafts
