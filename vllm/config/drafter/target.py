# SPDX-License-Identifier: Apache-2.0
"""A drafter's config against the target's."""

import re
from pathlib import Path
from typing import TYPE_CHECKING

from vllm.logger import init_logger

from .checkpoint import get_mask_token_id
from .families import takes_aux_hidden_states, tapped_layers
from .files import tensor_names

if TYPE_CHECKING:
    from vllm.config.speculative import SpeculativeConfig

logger = init_logger(__name__)

ONE_LAYER = "EAGLE-3, SafeAILab"  # a family whose heads have no other layer


def find_context(spec: "SpeculativeConfig") -> int | None:
    """Positions that a drafter can draft at; None: all of the target's.

    A draft model has its own context. EAGLE heads share the target's positions,
    whatever their config says, and end earlier only where the user says so.

    Raises:
        ValueError: no draft would ever fit.
    """
    drafts, target = spec.num_speculative_tokens, spec.target_model_config.max_model_len
    if drafts >= target:
        raise ValueError(
            f"num_speculative_tokens ({drafts}) must be below the target's "
            f"max_model_len ({target}): lower it, for example to 7."
        )
    if spec.draft_tree is not None and spec.draft_tree >= target:
        raise ValueError(
            f"draft_tree ({spec.draft_tree}) must be below the target's max_model_len "
            f"({target}): lower it."
        )
    context = spec.max_model_len
    if spec.method == "draft_model":
        context = spec.draft_model_config.max_model_len
    if context is not None and drafts >= context:
        raise ValueError(
            f"num_speculative_tokens ({drafts}) must be below the drafter's context "
            f"({context}): lower it, or raise max_model_len of speculative_config or "
            "max_position_embeddings of the drafter."
        )
    return context


def find_mask_token(spec: "SpeculativeConfig") -> int | None:
    """The token of the slots to be drafted; None for autoregressive drafting.

    Raises:
        ValueError: parallel drafting has none.
    """
    if not spec.parallel_drafting:
        return None
    if spec.method == "eagle":
        raise ValueError(
            "parallel_drafting needs a drafter with a learned mask_hidden, which "
            'method "eagle" lacks: use an EAGLE-3 style checkpoint (P-EAGLE) with '
            'method "eagle3".'
        )
    mask = get_mask_token_id(spec.draft_model_config.hf_config)
    vocab = spec.draft_model_config.get_vocab_size()
    if type(mask) is not int or not 0 <= mask < vocab:
        raise ValueError(
            f"parallel_drafting needs a mask token of the draft model's {vocab} "
            f"tokens, but its config names {mask!r}: correct mask_token_id, "
            "pard_token or ptd_token_id in config.json, or unset parallel_drafting."
        )
    return mask


def find_tapped_layers(spec: "SpeculativeConfig") -> tuple[int, ...] | None:
    """Ids of the target's layers that an EAGLE-3 head is fed the inputs of.

    Returns:
        None for the target's defaults; empty for heads that are fed its output.

    Raises:
        ValueError: the head was trained for another target.
    """
    config, target = spec.draft_model_config.hf_config, spec.target_model_config
    if spec.method != "eagle3" or not takes_aux_hidden_states(config):
        return ()
    width = getattr(config, "target_hidden_size", None)
    if width is not None and width != target.get_hidden_size():
        raise ValueError(
            f"target_hidden_size of {spec.model} ({width}) must be the target's "
            f"hidden size ({target.get_hidden_size()}): use a head that was trained "
            "for this target."
        )
    ids, depth = tapped_layers(config), target.get_total_num_hidden_layers()
    named = ids or ()
    if len(set(named)) < len(named) or not all(0 <= i <= depth for i in named):
        raise ValueError(
            f"eagle_aux_hidden_state_layer_ids of {spec.model} {list(named)} must be "
            f"different layers from 0 to {depth} of the target: use a head that was "
            "trained for this target, or correct them in config.json."
        )
    return ids


def correct_depth(spec: "SpeculativeConfig", family: str | None) -> None:
    """Corrects `num_hidden_layers` of heads that count the target's layers.

    SafeAILab's code builds one layer without looking at it. Their heads for Vicuna say
    40.
    """
    draft = spec.draft_model_config
    named = draft.hf_config.num_hidden_layers
    if family != ONE_LAYER or named == 1:
        return
    tensors = tensor_names(folder) if (folder := Path(spec.model)).is_dir() else ()
    if any(re.search(r"\blayers\.[1-9]", name) for name in tensors):
        return
    logger.info(
        "%s names %d layers; a head of its kind has one, whatever it says.",
        spec.model,
        named,
    )
    draft.hf_config.num_hidden_layers = draft.hf_text_config.num_hidden_layers = 1
    draft.model_arch_config = draft.get_model_arch_config()


def check_attention(spec: "SpeculativeConfig") -> None:
    """Checks the drafter's numbers of heads.

    Raises:
        ValueError: they do not divide.
    """
    config = spec.draft_model_config.hf_text_config
    heads = getattr(config, "num_attention_heads", None)
    shared = getattr(config, "num_key_value_heads", None) or 1
    # Some models name a number for each layer.
    if isinstance(heads, int) and isinstance(shared, int) and heads % shared:
        raise ValueError(
            f"num_attention_heads of {spec.model} ({heads}) must be a multiple of "
            f"num_key_value_heads ({shared}): correct them in config.json."
        )
