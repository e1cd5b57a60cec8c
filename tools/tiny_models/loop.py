# SPDX-License-Identifier: Apache-2.0
"""The optimisation loop that all models share."""

import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from .settings import BOS_ID, SEED, Plan

WARMUP = 0.03
FLOOR = 0.02
REPORTS = 20


def seed(offset: int) -> None:
    torch.manual_seed(SEED + offset)


def autocast(device: str) -> AbstractContextManager:
    """bf16 arithmetic on a GPU; the weights stay in single precision."""
    return torch.autocast(device, torch.bfloat16, enabled=device == "cuda")


def learning_rate(progress: float, peak: float) -> float:
    """Linear warm-up, then a cosine down to a fiftieth of the peak."""
    if progress < WARMUP:
        return peak * progress / WARMUP
    rest = (progress - WARMUP) / (1 - WARMUP)
    return peak * (FLOOR + (1 - FLOOR) * 0.5 * (1 + math.cos(math.pi * rest)))


def fit(
    name: str,
    model: torch.nn.Module,
    batch_loss: Callable[[], torch.Tensor],
    plan: Plan,
    device: str,
) -> dict[str, Any]:
    """Train ``model`` on what ``batch_loss`` draws, and tell how that went."""
    weights = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in weights if p.ndim == 2], "weight_decay": 0.1},
        {"params": [p for p in weights if p.ndim != 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=device == "cuda")
    losses: list[tuple[int, float]] = []
    start = time.monotonic()
    for step in range(1, plan.steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step / plan.steps, plan.lr)
        with autocast(device):
            loss = batch_loss()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % max(1, plan.steps // REPORTS) == 0 or step == plan.steps:
            losses.append((step, round(loss.item(), 4)))
            report(name, f"step {step}/{plan.steps} loss {losses[-1][1]}", start)
    return {
        "steps": plan.steps,
        "sequences_per_step": plan.batch,
        "sequence_tokens": plan.length,
        "peak_learning_rate": plan.lr,
        "parameters": sum(p.numel() for p in weights),
        "losses": losses,
        "seconds": round(time.monotonic() - start, 1),
        "device": torch.cuda.get_device_name() if device == "cuda" else "CPU",
    }


def report(name: str, text: str, start: float) -> None:
    print(f"[{name}] {time.monotonic() - start:6.1f} s  {text}", flush=True)


def windows(ids: torch.Tensor, count: int, length: int) -> torch.Tensor:
    """Random windows of the corpus, each behind a BOS.

    Args:
        ids: [tokens] integer.

    Returns:
        [count, length] int64, on the device of ``ids``.
    """
    starts = torch.randint(len(ids) - length, (count, 1), device=ids.device)
    body = ids[starts + torch.arange(length - 1, device=ids.device)].long()
    return torch.cat([torch.full_like(starts, BOS_ID), body], dim=1)
