# SPDX-License-Identifier: Apache-2.0
"""A request that wants no drafts: `disable_spec_decode` of its extra arguments."""

from typing import TYPE_CHECKING

from vllm.exceptions import VLLMValidationError

if TYPE_CHECKING:
    from vllm.config import SpeculativeConfig
    from vllm.sampling_params import SamplingParams

KEY = "disable_spec_decode"


def refuses_drafts(params: "SamplingParams | None") -> bool:
    """Whether no draft is to be accepted for a request."""
    return bool(params and params.extra_args and params.extra_args.get(KEY))


def check_opt_out(
    params: "SamplingParams", speculative_config: "SpeculativeConfig | None"
) -> None:
    """Checks the argument; without speculation there is nothing to turn off.

    Raises:
        VLLMValidationError: it is neither true nor false, or nobody goes by it.
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
