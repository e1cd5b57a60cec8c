# SPDX-License-Identifier: Apache-2.0
"""Text written by the target itself, from which every draft learns.

A draft is accepted where it writes what the target would, so it must learn on the
target's text, not on the corpus.
"""

import time

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from . import loop, target, tokenizer
from .settings import EOS_ID, PLANS, ROUND_SEQUENCES, ROUNDS, Run

LENGTH = PLANS["draft"].length


def generate(run: Run) -> None:
    """Write the training sequences to the work folder; EOS fills them up."""
    model = target.load(run)
    ids = tokenizer.encode_corpus(run).to(run.device)
    loop.seed(2)
    count = max(4, round(ROUND_SEQUENCES * run.scale))
    start = time.monotonic()
    rows = []
    for length, temperature in ROUNDS:
        prompts = loop.windows(ids, count, length)
        sampling = {"temperature": temperature, "top_k": 0} if temperature else {}
        with loop.autocast(run.device):
            out = model.generate(
                prompts,
                attention_mask=torch.ones_like(prompts),
                max_length=LENGTH,
                pad_token_id=EOS_ID,
                do_sample=bool(temperature),
                **sampling,
            )
        rows.append(F.pad(out, (0, LENGTH - out.shape[1]), value=EOS_ID))
        loop.report("distill", f"{count} x {LENGTH} at {temperature}", start)
    save_file({"train": torch.cat(rows).int().cpu()}, run.work / "distill.safetensors")


def load(run: Run) -> torch.Tensor:
    """[sequences, LENGTH] int64, on the run's device."""
    data = load_file(run.work / "distill.safetensors")
    return data["train"].long().to(run.device)


def pick(ids: torch.Tensor, count: int) -> torch.Tensor:
    """``count`` random rows."""
    return ids[torch.randint(len(ids), (count,), device=ids.device)]


def until_eos(ids: torch.Tensor) -> torch.Tensor:
    """1.0 up to each row's first EOS, 0.0 after it; same shape as ``ids``."""
    ends = (ids == EOS_ID).long()
    return (ends.cumsum(-1) - ends == 0).float()
