# SPDX-License-Identifier: Apache-2.0
"""Draft models of some of the target's layers: plain, PARD and PARD-2.

PARD: arXiv 2504.18583. PARD-2: arXiv 2605.08632. speculators trains neither, but its
P-EAGLE samples masks and attends to them as PARD does.
"""

from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from datasets import load_from_disk
from speculators.models.peagle.attention import create_peagle_mask_mod
from speculators.models.peagle.data import generate_cod_sample_indices
from torch.nn.attention.flex_attention import create_mask
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
)

from .heads import MASK_TOKEN_ID, K

NUM_LAYERS = 6
# States of the target that PARD-2 is fed, as transformers numbers them.
STATES, SCALE = (-1, -3), 0.02
# Arguments of transformers' trainer, those that differ from its defaults.
ARGUMENTS = {
    "learning_rate": 5e-4,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 0.03,
    "per_device_train_batch_size": 8,
    "train_sampling_strategy": "group_by_length",
    "length_column_name": "seq_len",
    "dataloader_num_workers": 4,
    "logging_steps": 100,
    "save_strategy": "no",
}
CONFIGS: dict[str, dict[str, Any]] = {"draft": {}}
CONFIGS["pard"] = {"pard_token": MASK_TOKEN_ID, "spd_type": "pard"}
CONFIGS["pard2"] = {
    "pard_token": MASK_TOKEN_ID,
    "spd_type": "pard2",
    "pard2": True,
    "pard2_proj_bias": False,
    "pard2_scale": SCALE,
    "pard2_target_layers": list(STATES),
}


def keep_layers(target: LlamaForCausalLM, count: int) -> LlamaForCausalLM:
    """A copy with the first, the last, and evenly between them some other layers."""
    kept = deepcopy(target)
    numbers = torch.linspace(0, len(kept.model.layers) - 1, count).round().int()
    kept.model.layers = torch.nn.ModuleList(kept.model.layers[n] for n in numbers)
    for number, layer in enumerate(kept.model.layers):
        layer.self_attn.layer_idx = number
    kept.config.num_hidden_layers = count
    kept.config.layer_types = None
    return kept


class Distilled(torch.nn.Module):
    """A draft model, and the target that it learns from.

    A row of a training pass is the text up to its anchor, followed by as many masks as
    its depth: depth 0 is the text itself. Deeper rows are sampled more sparsely.
    """

    def __init__(self, kind: str, target: LlamaForCausalLM, num_layers: int):
        super().__init__()
        self.draft = keep_layers(target, num_layers)
        self.target = target.requires_grad_(False)
        self.depths = 1 if kind == "draft" else K
        self.target_proj = None
        if kind == "pard2":
            width = target.config.hidden_size
            self.target_proj = torch.nn.Linear(len(STATES) * width, width, bias=False)
            torch.nn.init.zeros_(self.target_proj.weight)

    def forward(
        self, input_ids: torch.Tensor, loss_mask: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """The loss: KL divergence from the target, of the rows in answers.

        Args:
            input_ids: [texts, length] int64.
            loss_mask: [texts, length], 1 in answers.
        """
        length, device = input_ids.shape[1], input_ids.device
        after_first = torch.ones(1, length, device=device)
        after_first[:, 0] = 0
        anchor, depth = generate_cod_sample_indices(length, after_first, self.depths)
        row = anchor + depth
        with torch.no_grad():
            read = self.target(input_ids, use_cache=False, output_hidden_states=True)
        ids = torch.where(depth == 0, input_ids[:, row], MASK_TOKEN_ID)
        embeds, weights = self.draft.get_input_embeddings()(ids), loss_mask[:, row]
        if self.target_proj is not None:
            states = torch.cat([read.hidden_states[layer] for layer in STATES], dim=-1)
            before = F.pad(states[:, :-1], (0, 0, 1, 0))[:, anchor]
            embeds = embeds + SCALE * self.target_proj(before)
            weights = weights * drafted_before(read.logits, input_ids, anchor, row)
        one_text = torch.zeros(length, dtype=torch.long, device=device)
        attends = create_peagle_mask_mod(anchor, depth, one_text)
        rows = len(row)
        hidden = self.draft.model(
            inputs_embeds=embeds,
            attention_mask=create_mask(attends, None, None, rows, rows, device.type),
            position_ids=row.expand_as(ids),
            use_cache=False,
        ).last_hidden_state
        text, number = weights.nonzero(as_tuple=True)
        drafted = self.draft.lm_head(hidden[text, number]).float().log_softmax(-1)
        wanted = read.logits[text, row[number]].float().softmax(-1)
        losses = F.kl_div(drafted, wanted, reduction="none").sum(-1)
        weights = weights[text, number]
        return {"loss": (losses * weights).sum() / weights.sum()}


def drafted_before(
    logits: torch.Tensor, ids: torch.Tensor, anchor: torch.Tensor, row: torch.Tensor
) -> torch.Tensor:
    """[texts, rows]: the target's probability of the tokens from an anchor to its row.

    A draft counts only if those before it are accepted; PARD-2's loss is weighted so.
    """
    logprobs = logits[:, :-1].float().log_softmax(-1).gather(-1, ids[:, 1:, None])
    upto = F.pad(logprobs[..., 0].cumsum(-1), (1, 0))
    return (upto[:, row] - upto[:, anchor]).exp()


def pad(texts: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """A batch; the loss masks out what is padded."""
    names = "input_ids", "loss_mask"
    return {n: pad_sequence([t[n] for t in texts], batch_first=True) for n in names}


def train(
    kind: str, model: Path, data: Path, out: Path, steps: int, options: dict[str, Any]
) -> None:
    """Trains a draft model; `out` becomes a checkpoint that vLLM serves.

    Args:
        options: `num_layers`, and more arguments of transformers' trainer.
    """
    num_layers = options.pop("num_layers", NUM_LAYERS)
    given = ARGUMENTS | {"bf16": torch.cuda.is_available()} | options
    args = TrainingArguments(out, max_steps=steps, **given)
    target = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    distilled = Distilled(kind, target, num_layers)
    Trainer(distilled, args, pad, load_from_disk(data)).train()
    draft = distilled.draft.to(torch.bfloat16)
    draft.config.update(CONFIGS[kind] | {"dtype": "bfloat16"})
    if (projection := distilled.target_proj) is not None:
        draft.config.pard2_target_dim = projection.in_features
        weight = projection.weight.detach().to("cpu", torch.bfloat16)
        torch.save({"target_proj.weight": weight}, out / "warp_model.bin")
    draft.save_pretrained(out)
    AutoTokenizer.from_pretrained(model).save_pretrained(out)
