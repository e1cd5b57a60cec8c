# SPDX-License-Identifier: Apache-2.0
"""The PARD-2 draft model: PARD that is also fed the target's hidden states.

A token is fed the state of the token before it; masks are fed the same state as the
last token of their text. Training goes on from the bundled PARD model.
"""

import torch
from transformers import LlamaForCausalLM

from . import distill, export, loop, target
from .drafts import MaskedRows, distillation_loss
from .settings import PARD2_LAYERS, PARD2_SCALE, SHAPES, Run


class Pard2(torch.nn.Module):
    """A Llama model, and the projection of the target's states that is added to its
    embeddings."""

    def __init__(self, draft: LlamaForCausalLM) -> None:
        super().__init__()
        self.draft = draft
        size = len(PARD2_LAYERS) * SHAPES["target"].hidden
        width = draft.config.hidden_size
        self.target_proj = torch.nn.Linear(size, width, bias=False)
        torch.nn.init.zeros_(self.target_proj.weight)

    def forward(
        self, rows: MaskedRows, ids: torch.Tensor, states: torch.Tensor
    ) -> torch.Tensor:
        """Logits [batch, rows, vocab].

        Args:
            ids: [batch, length].
            states: [batch, length, layers * hidden], of the target for ``ids``.
        """
        before = torch.nn.functional.pad(states[:, :-1], (0, 0, 1, 0))
        fed = self.target_proj(before) * PARD2_SCALE
        # Masks before any text, whose anchor is -1, are fed the same as position 0.
        return rows.forward(self.draft, ids, fed[:, rows.anchor.clamp(min=0)])


def read(teacher: LlamaForCausalLM, ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The target's logits, and its states of PARD2_LAYERS concatenated, for ``ids``."""
    with torch.no_grad():
        out = teacher(ids, use_cache=False, output_hidden_states=True)
    states = [out.hidden_states[layer] for layer in PARD2_LAYERS]
    return out.logits, torch.cat(states, dim=-1)


def odds(logits: torch.Tensor, ids: torch.Tensor, rows: MaskedRows) -> torch.Tensor:
    """[batch, rows]: probability, by the target, of the tokens from a row's anchor to
    its own.

    A draft counts only if those before it are accepted, and the loss is weighted so.
    """
    chance = logits[:, :-1].float().log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    upto = torch.nn.functional.pad(chance.cumsum(-1), (1, 0))
    return (upto[:, rows.positions] - upto[:, rows.anchor.clamp(min=0)]).exp()


def train_pard2(run: Run) -> None:
    """Trained like PARD, with losses weighted by the target's probabilities."""
    plan, train, teacher = run.plan("pard2"), distill.load(run), target.load(run)
    loop.seed(7)
    pard = LlamaForCausalLM.from_pretrained(run.model_dir("pard"), dtype=torch.float32)
    model = Pard2(pard).to(run.device)

    def batch_loss() -> torch.Tensor:
        ids = distill.pick(train, plan.batch)
        rows = MaskedRows(plan.length, run.device)
        logits, states = read(teacher, ids)
        weights = distill.until_eos(ids)[:, rows.positions] * odds(logits, ids, rows)
        drafted = model(rows, ids, states)
        return distillation_loss(drafted, logits[:, rows.positions], weights)

    loop.fit("pard2", model, batch_loss, plan, run.device)
    export.save_pard2(run, model.draft, model.target_proj)
