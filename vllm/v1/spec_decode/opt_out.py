# SPDX-License-Identifier: Apache-2.0
"""Requests that turn drafting off, by `disable_spec_decode` in their extra arguments,
and those of which a drafter does not see all.

A drafter drafts for the latter all the same: output is the target's, "auto" drafts less
or nothing if that is better, and a draft model sees the output as it grows. Of a prompt
that it does not see at all, the bundled PARD has 1.2 instead of 2.8 tokens a step
accepted.
"""

from typing import TYPE_CHECKING, Any

from vllm.config.drafter import METHODS
from vllm.exceptions import VLLMValidationError
from vllm.logger import init_logger

if TYPE_CHECKING:
    from vllm.config import SpeculativeConfig
    from vllm.sampling_params import SamplingParams

logger = init_logger(__name__)

KEY = "disable_spec_decode"
# What a draft model does not see, by type of the prompt.
UNSEEN = {"embeds": "prompt embeddings", "multimodal": "images, audio or video"}


def refuses_drafts(params: "SamplingParams | None") -> bool:
    """Whether a request has turned drafting off: none of its drafts is accepted."""
    return bool(params and params.extra_args and params.extra_args.get(KEY))


def check_opt_out(
    params: "SamplingParams", speculative_config: "SpeculativeConfig | None"
) -> None:
    """Checks the argument; without speculation it has no effect.

    Raises:
        VLLMValidationError: it is neither true nor false, or the engine's speculator
            does not support it.
    """
    value = (params.extra_args or {}).get(KEY)
    if value not in (None, True, False):  # 1 and 0, as servers read true and false
        raise VLLMValidationError(
            f"{KEY} must be true or false, not {value!r}.", parameter=KEY, value=value
        )
    if not value or speculative_config is None:
        return
    if (why := speculative_config.drafter.why_not_unified) is not None:
        raise VLLMValidationError(
            f"{KEY} is not supported with {why}: leave it out, and start an engine "
            "without drafts for such requests.",
            parameter=KEY,
            value=value,
        )


def warn_of_unseen(
    spec: "SpeculativeConfig | None", prompt_type: str, params: Any, lora_request: Any
) -> None:
    """Warns, once of each kind, of what a request has that its drafter does not see."""
    if spec is None or spec.method not in METHODS:
        return
    if not hasattr(params, "extra_args") or refuses_drafts(params):  # pooling, opt-out
        return
    drafter = spec.drafter
    sees_tokens_alone = drafter.method == "draft_model" and not drafter.target_features
    if prompt_type in UNSEEN and sees_tokens_alone:
        remedy = "use a drafter that is fed the target's hidden states, such as EAGLE-3"
        _warn(UNSEEN[prompt_type], remedy)
    if lora_request is not None:
        _warn(
            "LoRA adapters", "merge the adapter into the target, with its own drafter"
        )


def _warn(what: str, remedy: str) -> None:
    logger.warning_once(
        "Requests with %s: the drafter does not see these, and fewer of its drafts are "
        "accepted. If that is too few, %s, or turn drafting off for such requests with "
        '"%s" in their extra arguments.',
        what,
        remedy,
        KEY,
    )
