# SPDX-License-Identifier: Apache-2.0
"""Gives back KV cache blocks outside a drafter's window, where that saves memory.

vLLM frees blocks by KV cache group, and the layers of a group share their blocks. If
the drafter's layers have groups of their own, so have as many of the target's layers
at a time, since all groups are equally large:

    32 and 16 layers     16 16 | 16            3 groups, of which the last is a window
    64 and 28 layers     28 28 8+20 | 28       padding takes more in short contexts
    32 layers and 1      1 1 1 .. 1 | 1        33 block tables to build in each step
"""

from collections.abc import Iterable, Mapping, Set
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.utils.math_utils import cdiv
from vllm.v1.core.kv_cache_planning import unify_kv_cache_spec_page_size
from vllm.v1.core.sink_window import SinkWindowSpec
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec, replace_as
from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator

if TYPE_CHECKING:
    from .speculator import UnifiedSpeculator

logger = init_logger(__name__)

MAX_GROUPS = 4
LEAST_SAVED = 0.05  # of the KV cache of a request of max_model_len
MOST_PADDED = 0.05  # what is added to the KV cache of a token by padding groups
# The blocks of a backlog are held: so it is processed after this many steps.
BACKLOG_STEPS = 256

Specs = Mapping[str, KVCacheSpec]


class Needs(NamedTuple):
    """What decides about the blocks that a request holds while it decodes.

    Attributes:
        window: `draft_window`.
        backlog_tokens: those that the drafter may process late.
        in_flight: the most tokens of steps in flight, and slots for drafts.
        max_len: `max_model_len`.
    """

    window: int
    backlog_tokens: int
    in_flight: int
    max_len: int


class Outcome(NamedTuple):
    """The KV cache spec of the drafter's layers, or why theirs stays."""

    spec: SinkWindowSpec | None
    why: str


def settle_window(specs: Specs, drafts: Set[str], needs: Needs) -> Outcome:
    """Decides whether blocks outside the window are given back.

    Args:
        specs: of all layers.
        drafts: names of the drafter's layers.
    """
    drafts = drafts & specs.keys()
    target = {spec for name, spec in specs.items() if name not in drafts}
    own = {specs[name] for name in drafts}
    if len(target) != 1 or len(own) != 1 or not all(map(_sees_all, target | own)):
        return Outcome(None, "layers differ in the kind of their KV cache")
    (whole,), (draft,) = target, own
    window = windowed(draft, needs)
    pages = unify_kv_cache_spec_page_size({"target": whole, "draft": window})
    if any(page.page_size_padded is not None for page in pages.values()):
        return Outcome(None, "blocks of drafter and target cannot be equally large")
    size, groups = _groups(len(specs) - len(drafts), len(drafts))
    number = sum(groups)
    if number > MAX_GROUPS:
        why = f"it would take {number} KV cache groups, more than {MAX_GROUPS}"
        return Outcome(None, why)
    padding = _padding(specs, (whole, draft), size, groups)
    if padding > MOST_PADDED:
        return Outcome(None, f"contexts within it would take {padding:.0%} more")
    saved = _saved(specs, pages, size, groups, needs)
    share = f"{saved:.0%} of the KV cache of a request of {needs.max_len} tokens"
    if saved < LEAST_SAVED:
        return Outcome(None, f"it would save only {share}")
    return Outcome(window, f"it saves {share}, in {number} groups of {size} layers")


def _padding(
    specs: Specs, layers: Iterable[KVCacheSpec], size: int, groups: tuple[int, int]
) -> float:
    """The part that padding adds to a token's KV cache; see `_saved`."""
    before = sum(spec.page_size_bytes / spec.block_size for spec in specs.values())
    pairs = zip(groups, layers, strict=True)
    after = sum(n * size * spec.page_size_bytes / spec.block_size for n, spec in pairs)
    return after / before - 1


def _saved(
    specs: Specs,
    pages: Mapping[str, Any],
    size: int,
    groups: tuple[int, int],
    needs: Needs,
) -> float:
    """The part of a request's KV cache that is given back at `max_model_len`.

    Args:
        pages: specs of the "target" and the "draft", with equally large pages.
        size: layers of a group.
        groups: of target and drafter.
    """
    before = sum(
        cdiv(needs.max_len, spec.block_size) * spec.page_size_bytes
        for spec in specs.values()
    )
    whole, window = pages["target"], pages["draft"]
    held = (
        cdiv(needs.max_len, whole.block_size),
        window.max_admission_blocks_per_request(needs.in_flight, needs.max_len),
    )
    blocks = sum(number * each for number, each in zip(groups, held, strict=True))
    return max(1 - blocks * size * whole.page_size_bytes / before, 0)


def _sees_all(spec: KVCacheSpec) -> bool:
    return type(spec) is FullAttentionSpec and not (
        spec.sliding_window
        or spec.attention_chunk_size
        or spec.non_causal
        or spec.page_size_padded
    )


def windowed(spec: FullAttentionSpec, needs: Needs) -> SinkWindowSpec:
    # Even with a window of one token, PARD-2 keeps the state of the one before.
    return replace_as(
        spec,
        SinkWindowSpec,
        drop=("attention_chunk_size", "non_causal"),
        sliding_window=max(needs.window, 2) + needs.backlog_tokens,
        backlog_tokens=needs.backlog_tokens,
    )


def _groups(num_target: int, num_draft: int) -> tuple[int, tuple[int, int]]:
    """Layers of each of vLLM's groups, and how many groups target and drafter have."""
    least, most = sorted((num_target, num_draft))
    size = most if most < 1.5 * least else least
    return size, (cdiv(num_target, size), cdiv(num_draft, size))


def _why_unsupported(config: VllmConfig) -> str | None:
    reasons = {
        "the hybrid KV cache manager is off": (
            config.scheduler_config.disable_hybrid_kv_cache_manager
        ),
        "it does not support KV connectors": config.kv_transfer_config is not None,
        "it does not support pipeline parallelism": (
            config.parallel_config.pipeline_parallel_size > 1
        ),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def _needs(speculator: "UnifiedSpeculator") -> Needs:
    config = speculator.target_config
    backlog = BACKLOG_STEPS if speculator.backlog is not None else 0
    in_flight = config.max_concurrent_batches * (1 + config.num_speculative_tokens)
    in_flight += config.num_lookahead_tokens
    window = speculator.draft_window
    return Needs(window, backlog, in_flight, config.model_config.max_model_len)


def with_draft_window(
    speculator: BaseSpeculator | None, specs: dict[str, KVCacheSpec]
) -> dict[str, KVCacheSpec]:
    """The KV cache specs of all layers, with those of the drafter's window."""
    if speculator is None or speculator.draft_window is None:
        return specs
    why = _why_unsupported(speculator.target_config)
    drafts = speculator.draft_attn_layer_names
    outcome = (
        Outcome(None, why) if why else settle_window(specs, drafts, _needs(speculator))
    )
    what = "kept until a request ends" if outcome.spec is None else "given back"
    logger.info_once("KV cache outside draft_window is %s: %s.", what, outcome.why)
    if outcome.spec is None:
        return specs
    return {name: outcome.spec if name in drafts else specs[name] for name in specs}
