# SPDX-License-Identifier: Apache-2.0
"""Draft models that are plain Llama models: autoregressive, and PARD."""

import torch
from speculators.losses import compound_loss, resolve_loss_config
from speculators.models.peagle.attention import create_peagle_mask_mod
from speculators.models.peagle.data import generate_cod_sample_indices
from torch.nn.attention.flex_attention import create_mask
from transformers import LlamaForCausalLM

from . import distill, export, loop, target
from .settings import DEPTHS, LOSS, MASK_ID, Run

TERMS = resolve_loss_config(LOSS, "eager")


def distillation_loss(
    logits: torch.Tensor, targets: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """Mean loss against the target's logits; both are [batch, n, vocab]."""
    flat, wanted = logits.flatten(0, 1)[None], targets.flatten(0, 1)[None]
    loss, _ = compound_loss(flat, wanted, mask.reshape(1, -1), mask, loss_config=TERMS)
    return loss


def train_draft(run: Run) -> None:
    """The plain autoregressive draft model."""
    loop.seed(3)
    model = target.new_llama("draft").to(run.device)
    fit_text(run, "draft", model)
    export.save_llama(run, "draft", model)


def fit_text(run: Run, name: str, model: LlamaForCausalLM) -> None:
    """Train ``model`` to predict the next token as the target does."""
    plan, train, teacher = run.plan(name), distill.load(run), target.load(run)

    def batch_loss() -> torch.Tensor:
        ids = distill.pick(train, plan.batch)
        with torch.no_grad():
            wanted = teacher(ids, use_cache=False).logits
        logits = model(ids, use_cache=False).logits
        return distillation_loss(logits, wanted, distill.until_eos(ids))

    loop.fit(name, model, batch_loss, plan, run.device)


class MaskedRows:
    """The rows of a PARD training pass: the text, then masks at sampled positions.

    A row is (anchor, depth): depth 0 is the text itself; depth d > 0 is the d-th mask
    after the text up to ``anchor``. Deeper masks are sampled more sparsely (COD).
    """

    def __init__(self, length: int, device: str) -> None:
        every = torch.ones(1, length, device=device)
        self.anchor, self.depth = generate_cod_sample_indices(length, every, DEPTHS)
        self.positions = self.anchor + self.depth

    def forward(
        self,
        model: LlamaForCausalLM,
        ids: torch.Tensor,
        fed: torch.Tensor | float = 0.0,
    ) -> torch.Tensor:
        """Logits [batch, rows, vocab] of the rows for ``ids`` [batch, length].

        Args:
            fed: [batch, rows, hidden], added to the embeddings.
        """
        rows = torch.where(self.depth == 0, ids[:, self.positions], MASK_ID)
        embeds = model.get_input_embeddings()(rows) + fed
        mask, positions = self._attention(ids.shape[1]), self.positions.expand_as(rows)
        out = model(
            inputs_embeds=embeds,
            attention_mask=mask,
            position_ids=positions,
            use_cache=False,
        )
        return out.logits

    def _attention(self, length: int) -> torch.Tensor:
        """[1, 1, rows, rows] bool: a mask attends to its text and to earlier masks."""
        one_text = torch.zeros(length, dtype=torch.long, device=self.depth.device)
        allowed = create_peagle_mask_mod(self.anchor, self.depth, one_text)
        rows = len(self.depth)
        return create_mask(allowed, None, None, rows, rows, device=str(one_text.device))


def train_pard(run: Run) -> None:
    """The PARD draft model: K tokens in one pass, K - 1 of them from mask tokens.

    As PARD's authors do, an autoregressive draft model is trained first, then adapted.
    """
    plan, train, teacher = run.plan("pard"), distill.load(run), target.load(run)
    loop.seed(4)
    model = target.new_llama("pard").to(run.device)
    fit_text(run, "pard_text", model)

    def batch_loss() -> torch.Tensor:
        ids = distill.pick(train, plan.batch)
        rows = MaskedRows(plan.length, run.device)
        with torch.no_grad():
            wanted = teacher(ids, use_cache=False).logits[:, rows.positions]
        mask = distill.until_eos(ids)[:, rows.positions]
        return distillation_loss(rows.forward(model, ids), wanted, mask)

    loop.fit("pard", model, batch_loss, plan, run.device)
    export.save_llama(run, "pard", model, pard_token=MASK_ID, spd_type="pard")
