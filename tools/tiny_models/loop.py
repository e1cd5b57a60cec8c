# SPDX-License-Identifier: Apache-2.0
"""The optimisation loop that all models share."""

import json
import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from .settings import BOS_ID, SEED, Plan

WARMUP = 0.03
FLOOR = 0.02
REPORTS = 20


def seed(offset: int = 0) -> None:
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


def make_optimizer(model: torch.nn.Module, device: str) -> torch.optim.AdamW:
    weights = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in weights if p.ndim == 2], "weight_decay": 0.1},
        {"params": [p for p in weights if p.ndim != 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=device == "cuda")


def fit(
    name: str,
    model: torch.nn.Module,
    batch_loss: Callable[[], torch.Tensor],
    plan: Plan,
    device: str,
    evaluate: Callable[[], dict[str, Any]],
) -> dict[str, Any]:
    """Train ``model`` and report how that went.

    Args:
        batch_loss: draws one batch and returns its scalar loss.
        evaluate: called half-way and at the end; its last result is in the report.
    """
    optimizer = make_optimizer(model, device)
    losses: list[tuple[int, float]] = []
    start = time.monotonic()
    every = max(1, plan.steps // REPORTS)
    step, progress = 0, 0.0
    while progress < 1:
        step += 1
        progress = _progress(step, start, plan)
        loss = _step(model, optimizer, batch_loss, learning_rate(progress, plan.lr))
        if step % every == 0 or progress >= 1:
            losses.append((step, round(loss.item(), 4)))
            report(name, f"step {step}/{plan.steps} loss {losses[-1][1]}", start)
        if step == plan.steps // 2:
            report(name, str(evaluate()), start)
    result = evaluate()
    report(name, str(result), start)
    return {
        "steps": step,
        "sequences_per_step": plan.batch,
        "sequence_tokens": plan.length,
        "peak_learning_rate": plan.lr,
        "parameters": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "losses": losses,
        "seconds": round(time.monotonic() - start, 1),
        "device": torch.cuda.get_device_name() if device == "cuda" else "CPU",
        **result,
    }


def _progress(step: int, start: float, plan: Plan) -> float:
    """Share of the training done, by steps or, where shorter, by time."""
    elapsed = (time.monotonic() - start) / plan.seconds
    return min(1.0, max(step / plan.steps, elapsed))


def _step(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    batch_loss: Callable[[], torch.Tensor],
    rate: float,
) -> torch.Tensor:
    for group in optimizer.param_groups:
        group["lr"] = rate
    with autocast(next(model.parameters()).device.type):
        loss = batch_loss()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss


def report(name: str, text: str, start: float) -> None:
    print(f"[{name}] {time.monotonic() - start:6.1f} s  {text}", flush=True)


def write_record(folder: Path, record: dict[str, Any]) -> None:
    (folder / "training.json").write_text(json.dumps(record, indent=1) + "\n")


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
