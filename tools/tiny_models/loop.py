# SPDX-License-Identifier: Apache-2.0
"""The training loop that all models share."""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from transformers import get_cosine_with_min_lr_schedule_with_warmup

from .settings import BOS_ID, SEED, Plan

WARMUP = 0.03  # of the steps
FLOOR = 0.02  # of the peak learning rate, at the end
REPORTS = 20


def seed(offset: int) -> None:
    torch.manual_seed(SEED + offset)


def autocast(device: str) -> AbstractContextManager:
    """bf16 arithmetic on a GPU; the weights stay in fp32."""
    return torch.autocast(device, torch.bfloat16, enabled=device == "cuda")


def fit(
    name: str,
    model: torch.nn.Module,
    batch_loss: Callable[[], torch.Tensor],
    plan: Plan,
    device: str,
) -> None:
    """Train ``model`` to minimize ``batch_loss``, which samples a batch itself."""
    weights = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in weights if p.ndim == 2], "weight_decay": 0.1},
        {"params": [p for p in weights if p.ndim != 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(
        groups, plan.lr, betas=(0.9, 0.95), fused=device == "cuda"
    )
    schedule = get_cosine_with_min_lr_schedule_with_warmup(
        optimizer, round(WARMUP * plan.steps), plan.steps, min_lr_rate=FLOOR
    )
    start = time.monotonic()
    for step in range(1, plan.steps + 1):
        with autocast(device):
            loss = batch_loss()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        if step % max(1, plan.steps // REPORTS) == 0 or step == plan.steps:
            report(name, f"step {step}/{plan.steps} loss {loss.item():.4f}", start)


def report(name: str, text: str, start: float) -> None:
    print(f"[{name}] {time.monotonic() - start:6.1f} s  {text}", flush=True)


def windows(ids: torch.Tensor, count: int, length: int) -> torch.Tensor:
    """Random windows of the corpus, each after a BOS.

    Args:
        ids: [tokens] integer.

    Returns:
        [count, length] int64, on the device of ``ids``.
    """
    starts = torch.randint(len(ids) - length, (count, 1), device=ids.device)
    body = ids[starts + torch.arange(length - 1, device=ids.device)].long()
    return torch.cat([torch.full_like(starts, BOS_ID), body], dim=1)
