# SPDX-License-Identifier: Apache-2.0
"""What the engine chooses while serving: how much is drafted, and how much verified."""

from dataclasses import replace
from typing import TYPE_CHECKING

from vllm.logger import init_logger
from vllm.platforms import current_platform

from .engine import V1, runs_unified, unsupported_by_engine
from .length import (
    MIN_REQUESTS_BY_DEFAULT,
    AutoSchedule,
    candidate_lengths,
    fix_length,
    is_auto,
    tree_sizes,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.config.speculative import SpeculativeConfig

logger = init_logger(__name__)


def settle_auto(vllm_config: "VllmConfig") -> bool:
    """Decides whether the engine chooses draft lengths, and whether it verifies only
    part of its drafts, before anything depends on it.

    If "auto" is only the default and the unified speculator does not draft, the length
    is fixed, and one log line says why.

    Returns:
        Whether the engine chooses.
    """
    spec = vllm_config.speculative_config
    if spec is None:
        return False
    is_unified = runs_unified(vllm_config)
    if is_auto(spec) and spec.is_auto_by_default and not is_unified:
        fix_length(spec, unsupported_by_engine(vllm_config) or V1)
    settle_trimming(vllm_config, is_unified)
    trims = is_unified and spec.enable_adaptive_verification
    if trims and _has_fixed_length(spec):
        # The engine then chooses how many drafts to verify, instead of the length.
        only = AutoSchedule([spec.drafter.num_speculative_tokens])
        spec.num_speculative_tokens_per_batch_size = only
        return True
    if not is_auto(spec) or spec.drafter is None:
        return is_auto(spec)
    choose_between(spec, _nodes_to_choose(vllm_config, is_unified))
    return True


def _has_fixed_length(spec: "SpeculativeConfig") -> bool:
    schedule = spec.num_speculative_tokens_per_batch_size
    # This may run again, on its own result.
    only = (spec.drafter.num_speculative_tokens,)
    return schedule is None or getattr(schedule, "lengths", None) == only


def choose_between(spec: "SpeculativeConfig", num_nodes: int | None) -> None:
    """Sets the draft lengths to choose from.

    Args:
        num_nodes: N, the most nodes of a tree; None for chains only.
    """
    depth = spec.drafter.num_speculative_tokens
    spec.drafter = replace(spec.drafter, num_nodes=num_nodes)
    spec.num_speculative_tokens = spec.drafter.num_verified
    lengths = candidate_lengths(depth, num_nodes, tree_sizes(spec.drafter))
    spec.num_speculative_tokens_per_batch_size = AutoSchedule(lengths)


def _nodes_to_choose(vllm_config: "VllmConfig", is_unified: bool) -> int | None:
    """The most nodes of a tree that "auto" may choose; None if it chooses no trees."""
    spec = vllm_config.speculative_config
    if spec.draft_tree is not None:
        return spec.draft_tree
    # Trees are candidates only where the engine has fast kernels to verify them.
    possible = (
        is_unified
        and spec.draft_sample_method == "greedy"
        and spec.rejection_sample_method == "standard"
        and vllm_config.parallel_config.data_parallel_size == 1
        and vllm_config.parallel_config.pipeline_parallel_size == 1
        and not current_platform.is_cpu()
        # Recurrent layers would keep a state for each node, to verify chains alone.
        and not vllm_config.model_config.has_inner_state
    )
    if not possible:
        return None
    # A tree and the token before it are verified in one step.
    rows = vllm_config.scheduler_config.max_num_batched_tokens
    rows = min(rows, vllm_config.model_config.max_model_len)
    sizes = tree_sizes(spec.drafter)
    return max((nodes for nodes in sizes if nodes < rows), default=None)


def settle_trimming(vllm_config: "VllmConfig", is_unified: bool) -> None:
    """Decides whether steps of "auto" verify only part of their drafts, if the user
    does not say.

    They do if this may gain something. If something in the engine does not support it,
    all drafts are verified, and one log line says what. What depends on the attention
    backend only workers know: they call `verify_all` later.

    Args:
        is_unified: whether the unified speculator drafts.
    """
    spec = vllm_config.speculative_config
    if spec.enable_adaptive_verification is not None:
        return
    spec.enable_adaptive_verification = False
    if not (is_unified and is_auto(spec) and _may_gain(vllm_config)):
        return
    spec.enable_adaptive_verification = spec.is_trimmed_by_default = True
    if (found := _why_not_trimmed(vllm_config)) is not None:
        verify_all(spec, found)


def _may_gain(vllm_config: "VllmConfig") -> bool:
    """Whether trimming may gain something beside "auto".

    It does not with few requests, nor with autoregressive drafting: each draft token
    takes a pass, so few are drafted where rows take time, and none can be spared.
    """
    max_num_seqs = vllm_config.scheduler_config.max_num_seqs
    is_parallel = vllm_config.speculative_config.drafter.is_parallel
    return max_num_seqs >= MIN_REQUESTS_BY_DEFAULT and is_parallel


def verify_all(spec: "SpeculativeConfig", why: str) -> None:
    """Has every step verify all its drafts, and logs why."""
    spec.enable_adaptive_verification = spec.is_trimmed_by_default = False
    logger.info(
        "Every step verifies all its drafts: verifying only the likeliest of large "
        "batches does not support %s.",
        why,
    )


def _why_not_trimmed(vllm_config: "VllmConfig") -> str | None:
    """What in an engine does not support trimming; None if nothing.

    vLLM refuses most of it with `enable_adaptive_verification`. On a CPU it gains
    nothing at 8 requests, and attention like MLA does more in every step.
    """
    spec, model = vllm_config.speculative_config, vllm_config.model_config
    parallel = vllm_config.parallel_config
    reasons = {
        "a CPU": current_platform.is_cpu(),
        "LoRA": vllm_config.lora_config is not None,
        "data parallelism": parallel.data_parallel_size > 1,
        "pipeline parallelism": parallel.pipeline_parallel_size > 1,
        "batch-sharded sampling": parallel.enable_batch_sharded_sampling,
        "returned sampling masks": model.return_sampling_mask,
        "returned routed experts": vllm_config.aux_output_config.enabled,
        "MLA": model.use_mla,
        "use_local_argmax_reduction": spec.use_local_argmax_reduction,
    }
    return next((what for what, is_there in reasons.items() if is_there), None)
