# SPDX-License-Identifier: Apache-2.0
"""Says once what a drafter does not see of requests, so that fewer drafts are accepted.

It drafts for them all the same. Output is the target's, "auto" drafts less or nothing
if that is better, and a draft model sees the output as it grows: of a prompt that it
does not see at all, the bundled PARD has 1.2 instead of 2.8 tokens a step accepted.
"""

from typing import TYPE_CHECKING, Any

from vllm.config.drafter import METHODS
from vllm.logger import init_logger
from vllm.v1.spec_decode.opt_out import KEY, refuses_drafts

if TYPE_CHECKING:
    from vllm.config import SpeculativeConfig

logger = init_logger(__name__)

# By type of the prompt.
UNSEEN = {"embeds": "prompt embeddings", "multimodal": "images, audio or video"}


def say_what_is_unseen(
    spec: "SpeculativeConfig | None", prompt_type: str, params: Any, lora_request: Any
) -> None:
    """Logs, once of each kind, what a request has that its drafter does not see."""
    if spec is None or spec.method not in METHODS or _refuses(params):
        return
    drafter = spec.drafter
    sees_tokens_alone = drafter.method == "draft_model" and not drafter.target_features
    if prompt_type in UNSEEN and sees_tokens_alone:
        remedy = "use a drafter that is fed the target's hidden states, such as EAGLE-3"
        _say(UNSEEN[prompt_type], remedy)
    if lora_request is not None:
        _say("LoRA adapters", "merge the adapter into the target, with its own drafter")


def _refuses(params: Any) -> bool:
    return not hasattr(params, "extra_args") or refuses_drafts(params)


def _say(what: str, remedy: str) -> None:
    logger.warning_once(
        "Requests with %s: the drafter does not see these, and fewer of its drafts are "
        "accepted. If that is too few, %s, or turn drafting off for such requests with "
        '"%s" in their extra arguments.',
        what,
        remedy,
        KEY,
    )
