# SPDX-License-Identifier: Apache-2.0
"""What the base says of a drafter that it cannot configure: of which key, and the cure.

The target's own errors read the same; users must see that it is the drafter's.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from huggingface_hub.errors import StrictDataclassError

if TYPE_CHECKING:
    from vllm.config.speculative import SpeculativeConfig

# Of an error of the base as much as tells, and what to change.
REMEDIES = {
    r"Model architectures \[.*?\] are not supported": (
        'correct "architectures" in its config.json, or name another drafter'
    ),
    r"model type `.*?` but Transformers does not recognize this architecture": (
        'correct "model_type" in its config.json, or update transformers'
    ),
    r"Unsupported model_type .*? for \w+ speculator": (
        'correct "model_type" in transformer_layer_config of its config.json, or name '
        "another drafter"
    ),
    r"Unknown quantization method: .*?\]": (
        'correct "quantization" of speculative_config, or leave it unset; the '
        "checkpoint's own is quant_method in its config.json"
    ),
    r"Quantization method specified in the model config .*? argument \(.*?\)": (
        'leave "quantization" of speculative_config unset'
    ),
    r"Validation error for field .*": "correct it in its config.json",
}


@contextmanager
def named_errors(spec: "SpeculativeConfig") -> Iterator[None]:
    """Within, the base reads a drafter's config.

    Raises:
        ValueError: it could not; the error names the drafter and what to change.
    """
    try:
        yield
    except (ValueError, StrictDataclassError) as error:
        named = _named(spec.model, str(error))
        if named is None:
            raise
        raise ValueError(named) from None


def _named(model: str | None, error: str) -> str | None:
    error = " ".join(error.split())
    for pattern, remedy in REMEDIES.items():
        if found := re.search(pattern, error):
            return f'"model" of speculative_config: {model}: {found[0]}: {remedy}.'
    return None
