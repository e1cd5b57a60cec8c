# SPDX-License-Identifier: Apache-2.0
"""Drafters whose vocabulary is not the target's, row for row.

Both kinds may be padded to another size: Qwen2.5-0.5B has 151936 rows and Qwen2.5-7B
152064, for the same 151665 tokens. Heads may draft some of the target's tokens alone.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch

from vllm.config.drafting import METHODS

if TYPE_CHECKING:
    from vllm.config.speculative import SpeculativeConfig


def match_vocabularies(spec: "SpeculativeConfig") -> None:
    """Gives a drafter the target's vocabulary size, where only padding differs.

    Sets `vocab_size` of the draft's config, and `draft_vocab_size` of a head that
    drafts all tokens; loading pads or cuts its rows to it.

    Raises:
        ValueError: the sizes differ, and so do the tokens.
    """
    target, draft = spec.target_model_config, spec.draft_model_config
    if spec.method not in METHODS or None in (target, draft):
        return
    wanted, own = target.get_vocab_size(), draft.get_vocab_size()
    if wanted == own or spec.use_heterogeneous_vocab:
        return
    config = draft.hf_config
    if spec.method == "draft_model":
        _check_tokens(spec, wanted, own)
    elif getattr(config, "draft_vocab_size", None) in (None, own):
        config.draft_vocab_size = wanted
    config.checkpoint_vocab_size = own
    draft.hf_text_config.vocab_size = wanted
    draft.model_arch_config = draft.get_model_arch_config()


def _check_tokens(spec: "SpeculativeConfig", wanted: int, own: int) -> None:
    """Compares tokenizers; a head has none of its own, and its size was checked."""
    target = spec.target_model_config
    trusts = target.trust_remote_code
    reason = why_different(
        _tokens(target.tokenizer, target.tokenizer_revision, trusts),
        # Not that of draft_model_config, which is the target's.
        _tokens(spec.model, spec.revision, trusts),
        min(wanted, own),
    )
    if reason is not None:
        raise ValueError(
            f"{spec.model} has {own} tokens and the target {wanted}, and {reason}: "
            "use a draft model of the target's own family, or set "
            "use_heterogeneous_vocab."
        )


def _tokens(
    model: str, revision: str | None, trust_remote_code: bool
) -> Mapping[str, int]:
    """Ids of a tokenizer's tokens; empty if there is none that can be loaded."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(
            model, revision=revision, trust_remote_code=trust_remote_code
        ).get_vocab()
    except (OSError, ValueError, ImportError):
        return {}


def why_different(
    target: Mapping[str, int], draft: Mapping[str, int], num_common: int
) -> str | None:
    """Why two tokenizers do not speak of the same tokens; None if they do.

    Tokens that only one of them names, as a tokenizer of PARD may its mask, are alike
    if the other one has no token of that id.

    Args:
        target: ids of the target's tokens.
        draft: ids of the draft's tokens.
        num_common: rows that both models have.
    """
    if not draft:
        return "it has no tokenizer to compare with the target's"
    if not target:
        return "the target's tokenizer cannot be loaded to compare its own with"
    if max(target.values(), default=0) >= num_common:
        return "it has no row for some of the target's tokens"
    names = {number: token for token, number in target.items()}
    for token, number in draft.items():
        if names.get(number, token) != token or target.get(token, number) != number:
            return f"its token {number}, {token!r}, is not the target's"
    return None


def check_token_offsets(
    offsets: torch.Tensor, model: str, num_target_tokens: int, is_whole: bool
) -> None:
    """Checks the table `d2t` of a head: its token i is the target's i + offsets[i].

    Args:
        offsets: [tokens of the head], integers.
        model: name of the head, for errors.
        num_target_tokens: size of the target's vocabulary.
        is_whole: whether the head drafts every token, for which the base has no table.

    Raises:
        ValueError: the table names tokens that are not the target's, one of them
            twice, or all in another order.
    """
    # In NumPy: engines are forked from a process that checked this, and would hang at
    # their first parallel loop if PyTorch had run one before.
    shifts = offsets.cpu().numpy().astype(np.int64)
    tokens = np.arange(len(shifts)) + shifts
    least, most = tokens.min(), tokens.max()
    # With the whole vocabulary there may be more rows than the target has: padding.
    if not is_whole and (least < 0 or most >= num_target_tokens):
        raise ValueError(
            f"d2t of {model} names tokens from {least} to {most}, but the target has "
            f"{num_target_tokens}: use a head that was trained for this target."
        )
    if len(np.unique(tokens)) < len(tokens) or (is_whole and shifts.any()):
        what = "all tokens in another order" if is_whole else "a token twice"
        raise ValueError(
            f"d2t of {model} names {what}: it must hold offsets, the target's id less "
            "the head's own; export the checkpoint again."
        )
