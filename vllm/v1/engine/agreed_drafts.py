# SPDX-License-Identifier: Apache-2.0
"""How many tokens data-parallel ranks draft that run in step with each other.

Their experts exchange tokens in every pass, and a rank without requests joins in with
batches of nothing. So all must run as many draft passes. Every rank says what it would
draft where the ranks tell each other anyway whether any has work left, at the same step
of each; until they meet again, all draft what the one with the most requests would: it
has the most tokens to gain, and the others wait for its steps.
"""

from typing import TYPE_CHECKING

import torch
from torch.distributed import ReduceOp

if TYPE_CHECKING:
    from vllm.v1.engine.core import DPEngineCoreProc, EngineCore
    from vllm.v1.worker.worker_base import WorkerBase

MOST_DRAFTS = 1 << 16  # more than any number of drafts of a request


def agree_on_drafts(engine: "DPEngineCoreProc") -> None:
    """To be called by all ranks at once. A user's own scheduler chooses nothing."""
    chosen = getattr(engine.scheduler, "draft_lengths", None)
    if chosen is None:
        return
    num_reqs, wish = chosen.wish()
    ranked = torch.tensor([num_reqs * MOST_DRAFTS + wish], dtype=torch.int64)
    torch.distributed.all_reduce(ranked, op=ReduceOp.MAX, group=engine.dp_group)
    chosen.agreed = int(ranked) % MOST_DRAFTS


def draft_as_agreed(engine: "EngineCore") -> None:
    """Before a batch of nothing: it is to be like the other ranks'."""
    chosen = getattr(engine.scheduler, "draft_lengths", None)
    if chosen is None or chosen.agreed in (None, chosen.told):
        return
    engine.model_executor.collective_rpc(set_idle_drafts, args=(chosen.agreed,))
    chosen.told = chosen.agreed


def set_idle_drafts(worker: "WorkerBase", num_drafts: int) -> None:
    """Batches of nothing verify and draft so many tokens from now on."""
    worker.model_runner.idle_drafts = num_drafts
