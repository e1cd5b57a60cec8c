# SPDX-License-Identifier: Apache-2.0
"""Text written by the target itself, from which every draft learns.

A draft is accepted where it writes what the target would, so it must learn on the
target's text, not on the corpus.
"""

import time
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from . import loop, target, tokenizer
from .settings import EOS_ID, PLANS, ROUND_SEQUENCES, ROUNDS, Run

LENGTH = PLANS["draft"].length
HELD_OUT_PROMPT, HELD_OUT_LENGTH = 128, 256


def continue_text(
    model: LlamaForCausalLM, prompts: torch.Tensor, length: int, temperature: float
) -> torch.Tensor:
    """``prompts`` [n, any] continued to ``length`` tokens; EOS fills what is left."""
    sampling = (
        {"do_sample": True, "temperature": temperature, "top_k": 0}
        if temperature
        else {"do_sample": False}
    )
    out = model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        max_length=length,
        pad_token_id=EOS_ID,
        **sampling,
    )
    fill = torch.full_like(out[:, :1], EOS_ID).expand(-1, length - out.shape[1])
    return torch.cat([out, fill], dim=1)


def generate(run: Run) -> None:
    """Write the training and held-out sequences to the work folder."""
    model = target.load(run)
    ids = tokenizer.encode_corpus(run).to(run.device)
    loop.seed(2)
    count = max(4, round(ROUND_SEQUENCES * run.scale))
    start = time.monotonic()
    rows = []
    for prompt, temperature in ROUNDS:
        prompts = loop.windows(ids, count, prompt)
        with loop.autocast(run.device):
            rows.append(continue_text(model, prompts, LENGTH, temperature))
        loop.report("distill", f"{count} x {LENGTH} at {temperature}", start)
    prompts = tokenizer.held_out_prompts(run, HELD_OUT_PROMPT, 3).to(run.device)
    held = continue_text(model, prompts, HELD_OUT_LENGTH, 0.0)
    ours = {"train": torch.cat(rows).int().cpu(), "held_out": held.int().cpu()}
    save_file(ours, _path(run))


def _path(run: Run) -> Path:
    return run.work / "distill.safetensors"


def load(run: Run) -> tuple[torch.Tensor, torch.Tensor]:
    """Sequences to train on and to evaluate on.

    Returns:
        [sequences, 512] and [prompts, 256], int64, on the run's device.
    """
    data = load_file(_path(run))
    return data["train"].long().to(run.device), data["held_out"].long().to(run.device)


def pick(ids: torch.Tensor, count: int) -> torch.Tensor:
    """``count`` random rows."""
    return ids[torch.randint(len(ids), (count,), device=ids.device)]


def until_eos(ids: torch.Tensor) -> torch.Tensor:
    """1.0 up to each row's first EOS, 0.0 after it; same shape as ``ids``."""
    ends = (ids == EOS_ID).long()
    return (ends.cumsum(-1) - ends == 0).float()
