# SPDX-License-Identifier: Apache-2.0
"""Turns drafting off for a request: `disable_spec_decode` in its extra arguments."""

from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from vllm.exceptions import VLLMValidationError
from vllm.logger import init_logger

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vllm.config import SpeculativeConfig
    from vllm.sampling_params import SamplingParams

logger = init_logger(__name__)

KEY = "disable_spec_decode"


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
    given = params.extra_args or {}
    value = given.get(KEY)
    if value not in (None, True, False):  # 1 and 0, as servers read true and false
        raise VLLMValidationError(
            f"{KEY} must be true or false, not {value!r}.", parameter=KEY, value=value
        )
    if speculative_config is not None and KEY not in given:
        _say_if_misspelt(given)
    if not value or speculative_config is None:
        return
    if (why := speculative_config.drafter.why_not_unified) is not None:
        raise VLLMValidationError(
            f"{KEY} is not supported with {why}: leave it out, and start an engine "
            "without drafts for such requests.",
            parameter=KEY,
            value=value,
        )


def _say_if_misspelt(given: "Iterable[Any]") -> None:
    """Warns of a misspelt key: no error, since plugins have arguments of their own.

    Once, and without the key: clients can send any number of any text.
    """
    keys = [key for key in given if isinstance(key, str) and len(key) < 2 * len(KEY)]
    if get_close_matches(KEY, keys, n=1, cutoff=0.75):
        logger.warning_once(
            "A request has an extra argument that does not turn drafting off: did its "
            'client mean "%s"?',
            KEY,
        )
