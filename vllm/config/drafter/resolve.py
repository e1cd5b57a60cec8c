# SPDX-License-Identifier: Apache-2.0
"""From a speculative config and a drafter's files to `DrafterConfig`, step by step."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import wraps
from typing import TYPE_CHECKING

from huggingface_hub.errors import StrictDataclassError

from vllm.logger import init_logger

from .checkpoint import find_checkpoint
from .drafter import METHODS, DrafterConfig
from .engine import find_unsupported
from .families import default_layers
from .features import find_target_features
from .length import check_auto
from .settings import check_settings, check_tree, check_width, fill_settings
from .target import (
    check_attention,
    correct_depth,
    find_context,
    find_mask_token,
    find_tapped_layers,
)
from .vocabulary import match_vocabularies

if TYPE_CHECKING:
    from vllm.config.speculative import SpeculativeConfig

logger = init_logger(__name__)

# What vLLM says of a draft model's config that it cannot read, as much as tells, and
# what to change. The target's own errors read the same: users must see whose it is.
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


def resolves_drafter(
    post_init: Callable[["SpeculativeConfig"], None],
) -> Callable[["SpeculativeConfig"], None]:
    """Wraps `SpeculativeConfig.__post_init__`, where vLLM reads the draft model's
    config. What the checkpoint's files say goes in before; `drafter` comes out.

    Raises:
        ValueError: the config cannot draft; the error says what to change.
    """

    @wraps(post_init)
    def resolve(self: "SpeculativeConfig") -> None:
        check_settings(self)
        self.drafter = read_files(self)
        with _named_errors(self):
            post_init(self)
        self.drafter = compare_with_target(self)
        self.num_speculative_tokens = self.drafter.num_verified

    return resolve


def read_files(spec: "SpeculativeConfig") -> DrafterConfig | None:
    """Fills in what is unset, by the checkpoint; what is known of the drafter then.

    None where files do not tell the method: then vLLM goes by words in its path.
    """
    checkpoint = find_checkpoint(spec)
    if checkpoint is None:
        spec.parallel_drafting = bool(spec.parallel_drafting)
        return None
    fill_settings(spec, checkpoint)
    if spec.method not in METHODS:
        return None
    family = checkpoint.family and checkpoint.family.name
    return DrafterConfig(spec.method, spec.num_speculative_tokens, family)


def compare_with_target(spec: "SpeculativeConfig") -> DrafterConfig:
    """The drafter, once both models' configs are known."""
    check_width(spec)
    check_auto(spec)
    width = spec.parallel_drafting_width or spec.num_speculative_tokens
    drafter = DrafterConfig(
        method=spec.method,
        num_speculative_tokens=spec.num_speculative_tokens,
        family=spec.drafter and spec.drafter.family,
        is_parallel=spec.parallel_drafting,
        parallel_width=width if spec.parallel_drafting else 1,
        num_nodes=spec.draft_tree,
        unsupported=find_unsupported(spec),
    )
    check_tree(spec, drafter)
    has_configs = None not in (spec.target_model_config, spec.draft_model_config)
    if spec.method in METHODS and has_configs:
        drafter = _compare_configs(spec, drafter)
        logger.info("%s", describe(spec, drafter))
    return drafter


def _compare_configs(
    spec: "SpeculativeConfig", drafter: DrafterConfig
) -> DrafterConfig:
    check_attention(spec)
    correct_depth(spec, drafter.family)
    context, tapped = find_context(spec), find_tapped_layers(spec)
    features = find_target_features(spec, drafter.family)
    return replace(
        drafter,
        context=context,
        tapped_layers=features.tapped if features else tapped,
        target_features=features,
        checkpoint_vocab_size=match_vocabularies(spec),
        mask_token_id=find_mask_token(spec),
    )


def describe(spec: "SpeculativeConfig", drafter: DrafterConfig) -> str:
    """One line on what was made of a checkpoint."""
    tree = f"a tree of {drafter.num_nodes} verified, " if drafter.num_nodes else ""
    return (
        f"Drafter {spec.model}: family {drafter.family or 'unknown'!r}, method "
        f"{drafter.method}, {drafter.num_speculative_tokens} tokens a step, {tree}"
        f"{drafter.parallel_width} a pass, mask token {drafter.mask_token_id}, fed by "
        f"{_fed_by(spec, drafter)}."
    )


def _fed_by(spec: "SpeculativeConfig", drafter: DrafterConfig) -> str:
    if drafter.target_features is not None:
        return f"layers {drafter.target_features.layers}"
    if drafter.method == "draft_model":
        return "tokens alone"
    if drafter.tapped_layers is None:
        depth = spec.target_model_config.get_total_num_hidden_layers()
        return f"layers {default_layers(depth)}, the target's defaults"
    return (
        f"layers {drafter.tapped_layers}" if drafter.tapped_layers else "the last layer"
    )


@contextmanager
def _named_errors(spec: "SpeculativeConfig") -> Iterator[None]:
    """Within, vLLM reads a drafter's config; an error names the drafter."""
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
