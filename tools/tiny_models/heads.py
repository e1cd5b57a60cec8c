# SPDX-License-Identifier: Apache-2.0
"""EAGLE-3 and P-EAGLE heads, with the speculators library's models and losses."""

from typing import Any

import torch
from speculators.models.eagle3 import Eagle3DraftModel
from speculators.models.peagle import PEagleDraftModel
from speculators.train.vocab_mapping import build_vocab_mappings_from_distribution
from transformers import LlamaModel

from . import distill, export, loop, target
from .drafts import TERMS
from .settings import (
    AUX_LAYERS,
    DEPTHS,
    DRAFT_VOCAB_SIZE,
    MASK_ID,
    SHAPES,
    VOCAB_SIZE,
    K,
    Run,
)


def pack(teacher: LlamaModel, ids: torch.Tensor, lead: int) -> dict[str, torch.Tensor]:
    """Concatenated texts, as inputs of the heads' forward passes.

    A row pairs token i + 1 with the target's hidden state of token i. The first
    ``lead`` rows of a text have no loss, since drafts past the end of the previous text
    would be scored on them.

    Args:
        teacher: the target without its last norm.
        ids: [texts, length].

    Returns:
        Tensors [1, rows], of hidden states [1, rows, size].
    """
    with torch.no_grad():
        states = teacher(ids, use_cache=False, output_hidden_states=True).hidden_states
    read = torch.cat([states[layer] for layer in AUX_LAYERS], dim=-1)
    mask = distill.until_eos(ids)[:, 1:].clone()
    mask[:, :lead] = 0
    texts = torch.arange(len(ids), device=ids.device)[:, None].expand_as(mask)
    return {
        "hidden_states": read[:, :-1].flatten(0, 1)[None].float(),
        "input_ids": ids[:, 1:].reshape(1, -1),
        "document_ids": texts.reshape(1, -1),
        "loss_mask": mask.reshape(1, -1),
        "verifier_last_hidden_states": states[-1][:, 1:].flatten(0, 1)[None].float(),
    }


def new_head(run: Run, name: str, kind: Any, **options: Any) -> Any:
    """A head for the saved target, of a class of the speculators library.

    Its vocabulary are the tokens that the target writes most often.
    """
    counts = torch.bincount(distill.load(run).flatten().cpu(), minlength=VOCAB_SIZE)
    d2t, t2d = build_vocab_mappings_from_distribution(
        dict(enumerate(counts.tolist())), DRAFT_VOCAB_SIZE, VOCAB_SIZE
    )
    head = kind.from_training_args(
        target.llama_config(SHAPES[name], tie_word_embeddings=False),
        t2d=t2d,
        d2t=d2t,
        verifier_name_or_path=str(run.model_dir("target")),
        target_layer_ids=list(AUX_LAYERS),
        draft_vocab_size=DRAFT_VOCAB_SIZE,
        **options,
    )
    # Starts as the target's; a small head benefits from its own lm_head.
    head.lm_head.weight.requires_grad_(True)
    return head.to(run.device)


def train_eagle3(run: Run) -> None:
    loop.seed(5)
    # Trained so; whether compiling would save time here was not measured.
    torch.compiler.set_stance("force_eager")
    head = new_head(
        run,
        "eagle3",
        Eagle3DraftModel,
        ttt_steps=K,
        norm_before_residual=True,
        draft_attn_impl="sdpa",
    )
    _fit(run, "eagle3", head, lead=K, ttt_steps=K)
    # vLLM shares the target's embeddings with a head that has none.
    export.save_head(run, "eagle3", head, drop=("embed_tokens.weight",))


def train_peagle(run: Run) -> None:
    loop.seed(6)
    # Compiled, flex_attention skips what the mask leaves empty, which is most of it.
    torch.compiler.set_stance("default")
    head = new_head(
        run,
        "peagle",
        PEagleDraftModel,
        num_depths=DEPTHS,
        mask_token_id=MASK_ID,
        # It has no backward pass on a CPU.
        draft_attn_impl="simple_flex_attention" if run.device == "cuda" else "sdpa",
    )
    head.embed_tokens.weight.requires_grad_(True)
    _fit(run, "peagle", head, lead=1, num_depths=DEPTHS)
    export.save_head(run, "peagle", head)


def _fit(run: Run, name: str, head: Any, lead: int, **options: Any) -> None:
    plan, train, teacher = run.plan(name), distill.load(run), target.load(run).model
    teacher.norm = torch.nn.Identity()  # the heads have their own copy

    def batch_loss() -> torch.Tensor:
        packed = pack(teacher, distill.pick(train, plan.batch), lead)
        return head(**packed, **options, loss_config=TERMS)[1]

    loop.fit(name, head, batch_loss, plan, run.device)
