# SPDX-License-Identifier: Apache-2.0
"""Checks `draft_window`."""

from typing import TYPE_CHECKING

from vllm.logger import init_logger

if TYPE_CHECKING:
    from vllm.config.speculative import SpeculativeConfig

logger = init_logger(__name__)


def check_window(spec: "SpeculativeConfig") -> None:
    """Checks `draft_window` against the drafter's layers.

    Raises:
        ValueError: some have a larger window of their own, or attend to chunks.
    """
    draft, window = spec.draft_model_config, spec.draft_window
    if window is None:
        return
    own = draft.get_sliding_window() or 0
    if own > window:
        raise ValueError(
            f"draft_window ({window}) must be at least the window that layers of "
            f"{spec.model} have of their own ({own}): raise it, or unset it."
        )
    if draft.attention_chunk_size is not None:
        raise ValueError(
            f"draft_window does not support {spec.model}, some layers of which attend "
            "to chunks in the place of all tokens: unset it."
        )
    if window <= spec.num_speculative_tokens:
        logger.warning(
            "draft_window (%d) is not above num_speculative_tokens (%d): the drafter "
            "sees little but its own drafts. Raise it to the context that it was "
            "trained for, or unset it.",
            window,
            spec.num_speculative_tokens,
        )
    longest = spec.target_model_config.max_model_len
    if window >= longest:
        logger.warning(
            "draft_window (%d) leaves out nothing of the target's max_model_len (%d): "
            "lower it, or unset it.",
            window,
            longest,
        )
