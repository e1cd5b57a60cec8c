# SPDX-License-Identifier: Apache-2.0
"""Draft models whose vocabulary is padded to another size than the target's.

Qwen2.5-0.5B has 151936 rows and Qwen2.5-7B 152064, for the same 151665 tokens.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config.speculative import SpeculativeConfig


def match_vocabularies(spec: "SpeculativeConfig") -> None:
    """Gives a draft model the target's vocabulary size, where only padding differs.

    Sets `vocab_size` of the draft's config; loading pads or cuts its rows to it.

    Raises:
        ValueError: the sizes differ, and so do the tokens.
    """
    target, draft = spec.target_model_config, spec.draft_model_config
    if spec.method != "draft_model" or None in (target, draft):
        return
    wanted, own = target.get_vocab_size(), draft.get_vocab_size()
    if wanted == own or spec.use_heterogeneous_vocab:
        return
    reason = why_different(
        _tokens(target.tokenizer), _tokens(spec.model), min(wanted, own)
    )
    if reason is not None:
        raise ValueError(
            f"{spec.model} has {own} tokens and the target {wanted}, and {reason}: "
            "use a draft model of the target's own family, or set "
            "use_heterogeneous_vocab."
        )
    draft.hf_config.checkpoint_vocab_size = own
    draft.hf_text_config.vocab_size = wanted
    draft.model_arch_config = draft.get_model_arch_config()


def _tokens(model: str) -> Mapping[str, int]:
    """Ids of a tokenizer's tokens; empty if there is no tokenizer."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(model).get_vocab()
    except (OSError, ValueError):
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
    if max(target.values(), default=0) >= num_common:
        return "it has no row for some of the target's tokens"
    names = {number: token for token, number in target.items()}
    for token, number in draft.items():
        if names.get(number, token) != token or target.get(token, number) != number:
            return f"its token {number}, {token!r}, is not the target's"
    return None
