# SPDX-License-Identifier: Apache-2.0
"""Trains a drafter, heads with the speculators library's own trainer."""

import math
from pathlib import Path
from typing import Any

import torch
from datasets import load_from_disk
from speculators.models.peagle import PEagleSpeculatorConfig
from speculators.train.cli import main as speculators_train
from speculators.train.config import TrainConfig

from . import draft_models
from .heads import DRAFT_VOCAB_SIZE, HEADS, LAYERS, MASK_TOKEN_ID

RATIO = 0.98  # of the text; the rest is for validation
COMMON = {
    "target_layer_ids": list(LAYERS),
    "mask_token_id": MASK_TOKEN_ID,
    "draft_vocab_size": DRAFT_VOCAB_SIZE,
    "on_missing": "raise",
    "train_data_ratio": RATIO,
    "scheduler_type": "cosine",
    "scheduler_warmup_ratio": 0.03,
    "num_workers": 8,
    # A step that is logged waits for the GPU nine times.
    "log_freq": 100,
    # Nothing is compiled, unless for flex attention: that takes minutes, as long as all
    # steps of so small a head, and fails for the fused losses with PyTorch 2.11.
    "loss_implementation": "eager",
    "draft_attn_impl": "sdpa",
}

# A P-EAGLE head, too, keeps the target's embeddings, which `slim` leaves out: for this
# there is a flag, which speculators does not hand on.
PEagleSpeculatorConfig.model_fields["embed_requires_grad"].default = False
PEagleSpeculatorConfig.model_rebuild(force=True, _types_namespace={"torch": torch})


def arguments(head: str, **options: Any) -> list[str]:
    """The command line of `speculators train`."""
    found = ["--speculator-type", head]
    for name, value in {**COMMON, **HEADS[head], **options}.items():
        flag = "--" + name.replace("_", "-")
        values = value if isinstance(value, list) else [value]
        found += [flag] if value is True else [flag, *map(str, values)]
    return found


def train(
    head: str, model: Path, data: Path, out: Path, steps: int, options: dict[str, Any]
) -> None:
    """Trains a drafter. The folder of a head's last epoch in `out` is a checkpoint that
    vLLM serves; of a draft model it is `out`.

    Args:
        options: more arguments of `speculators train`, or of transformers' trainer.
    """
    if head not in HEADS:
        draft_models.train(head, model, data, out, steps, options)
        return
    if (COMMON | options)["draft_attn_impl"] == "sdpa":
        torch.compiler.set_stance("force_eager")
    options = {"max_steps": steps} | options
    epochs = epochs_of(data, options)
    options |= {"verifier_name_or_path": model, "data_path": data, "save_path": out}
    speculators_train(TrainConfig.resolve(arguments(head, **options, epochs=epochs)))


def epochs_of(data: Path, options: dict[str, Any]) -> int:
    """What `max_steps` take at most: of each epoch too many one step would be done."""
    tokens = sum(load_from_disk(data).with_format(None)["seq_len"])
    length = options.get("total_seq_len", TrainConfig().data.total_seq_len)
    least = math.ceil(tokens * options.get("train_data_ratio", RATIO) / length)
    return math.ceil(options["max_steps"] / least)
