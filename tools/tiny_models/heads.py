# SPDX-License-Identifier: Apache-2.0
"""EAGLE-3 and P-EAGLE heads: models, losses and files of the speculators library."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from speculators.losses import resolve_loss_config
from speculators.models.eagle3 import Eagle3DraftModel
from speculators.models.peagle import PEagleDraftModel
from speculators.models.peagle.data import generate_cod_sample_indices

from . import distill, estimate, export, loop, target
from .settings import (
    AUX_LAYERS,
    DEPTHS,
    DRAFT_VOCAB_SIZE,
    LOSS,
    MASK_ID,
    SHAPES,
    VOCAB_SIZE,
    K,
    Run,
)

TERMS = resolve_loss_config(LOSS, "eager")


@dataclass
class Pack:
    """Texts end to end, as the heads' forward passes take them.

    A row pairs token i + 1 with the target's hidden state of token i.
    """

    hidden_states: torch.Tensor  # [1, rows, aux * hidden]
    input_ids: torch.Tensor  # [1, rows] int64
    document_ids: torch.Tensor  # [1, rows] int64
    loss_mask: torch.Tensor  # [1, rows] float32
    verifier_last_hidden_states: torch.Tensor  # [1, rows, hidden]


def pack(tapped: target.Tapped, ids: torch.Tensor, lead: int) -> Pack:
    """Pack ``ids`` [texts, length]; a text's first ``lead`` rows bear no loss.

    Without a lead, rows drafted past one text's end would be scored on the next's.
    """
    aux, last = tapped(ids)
    mask = distill.until_eos(ids)[:, 1:].clone()
    mask[:, :lead] = 0
    texts = torch.arange(len(ids), device=ids.device)[:, None].expand_as(mask)
    return Pack(
        hidden_states=aux[:, :-1].flatten(0, 1)[None].float(),
        input_ids=ids[:, 1:].reshape(1, -1),
        document_ids=texts.reshape(1, -1),
        loss_mask=mask.reshape(1, -1),
        verifier_last_hidden_states=last[:, 1:].flatten(0, 1)[None].float(),
    )


def frequent_tokens(ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The vocabulary a head drafts from: the tokens the target writes most.

    Returns:
        t2d [vocab] bool, whether a token can be drafted, and d2t [draft vocab]
        int64, what to add to a draft id to get the target's.
    """
    counts = torch.bincount(ids.flatten().cpu(), minlength=VOCAB_SIZE)
    kept = counts.argsort(descending=True, stable=True)[:DRAFT_VOCAB_SIZE].sort()[0]
    t2d = torch.zeros(VOCAB_SIZE, dtype=torch.bool)
    t2d[kept] = True
    return t2d, kept - torch.arange(DRAFT_VOCAB_SIZE)


def new_head(run: Run, name: str, train: torch.Tensor, **options: Any) -> Any:
    """A head for the saved target, of the class that ``name`` says."""
    kind = {"eagle3": Eagle3DraftModel, "peagle": PEagleDraftModel}[name]
    t2d, d2t = frequent_tokens(train)
    head = kind.from_training_args(
        target.llama_config(SHAPES[name], tie_word_embeddings=False),
        t2d=t2d,
        d2t=d2t,
        verifier_name_or_path=str(run.model_dir("target")),
        target_layer_ids=list(AUX_LAYERS),
        draft_vocab_size=DRAFT_VOCAB_SIZE,
        draft_attn_impl="sdpa",
        **options,
    )
    # Starts as the target's; a small head gains from a head of its own.
    head.lm_head.weight.requires_grad_(True)
    return head.to(run.device)


def train_eagle3(run: Run) -> None:
    train, _ = distill.load(run)
    loop.seed(5)
    head = new_head(run, "eagle3", train, ttt_steps=K, norm_before_residual=True)
    score = partial(head, ttt_steps=K, loss_config=TERMS)
    # vLLM shares the target's embeddings with a head that brings none.
    _train(run, "eagle3", head, score, K, _eagle3_best, ("embed_tokens.weight",))


def train_peagle(run: Run) -> None:
    train, _ = distill.load(run)
    loop.seed(6)
    head = new_head(run, "peagle", train, num_depths=DEPTHS, mask_token_id=MASK_ID)
    head.embed_tokens.weight.requires_grad_(True)
    score = partial(head, num_depths=DEPTHS, loss_config=TERMS)
    _train(run, "peagle", head, score, 1, _peagle_best, ())


def _train(
    run: Run, name: str, head: Any, score: Any, lead: int, best: Any, drop: Any
) -> None:
    # speculators compiles its forward passes, which takes longer than it saves here.
    torch.compiler.set_stance("force_eager")
    plan = run.plan(name)
    tapped = target.Tapped(target.load(run))
    train, held = distill.load(run)

    def batch_loss() -> torch.Tensor:
        packed = pack(tapped, distill.pick(train, plan.batch), lead)
        return score(**vars(packed))[1]

    def evaluate() -> dict[str, object]:
        with torch.no_grad(), loop.autocast(run.device):
            hits = [_hits(head, tapped, best, row[None]) for row in held]
        return estimate.from_hits(torch.stack(hits), held)

    record = loop.fit(name, head, batch_loss, plan, run.device, evaluate)
    export.save_head(run, name, head, drop)
    loop.write_record(run.model_dir(name), record)


def _hits(
    head: Any, tapped: target.Tapped, best: Any, ids: torch.Tensor
) -> torch.Tensor:
    """[length, K] bool for one text [1, length]; see ``estimate.from_hits``."""
    drafts = best(head, pack(tapped, ids, 0))
    drafts = drafts + head.d2t[drafts]
    padded = torch.nn.functional.pad(ids[0, 2:], (0, K), value=-1)
    hits = drafts == padded.unfold(0, K, 1)[: len(drafts)]
    # Row j holds token j + 1, the newest token of the step it drafts for.
    return torch.nn.functional.pad(hits, (0, 0, 1, 0))


def _eagle3_best(head: Eagle3DraftModel, packed: Pack) -> torch.Tensor:
    """Greedy drafts [rows, K], as ids of the draft vocabulary."""
    inputs = vars(packed) | {"verifier_last_hidden_states": None}
    return torch.stack(head(**inputs, ttt_steps=K), dim=-1)[0]


def _peagle_best(head: PEagleDraftModel, packed: Pack) -> torch.Tensor:
    """Greedy drafts [rows, K], as ids of the draft vocabulary."""
    logits: list[torch.Tensor] = []
    hook = head.lm_head.register_forward_hook(lambda *a: logits.append(a[2]))
    every = torch.ones_like(packed.loss_mask)
    options = {"num_depths": K, "down_sample_ratio": 1.0, "down_sample_ratio_min": 1.0}
    head(**vars(packed) | {"loss_mask": every}, **options, loss_config=TERMS)
    hook.remove()
    rows = every.shape[1]
    anchor, depth = generate_cod_sample_indices(rows, every, **options)
    best = torch.zeros(rows, K, dtype=torch.long, device=every.device)
    best[anchor, depth] = logits[0][0].argmax(-1)
    return best
