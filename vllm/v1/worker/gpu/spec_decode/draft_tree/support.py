# SPDX-License-Identifier: Apache-2.0
"""Whether an engine can verify draft trees; if not, chains are drafted."""

from typing import TYPE_CHECKING, Any

from vllm.config import VllmConfig, get_layers_from_vllm_config
from vllm.config.compilation import CUDAGraphMode
from vllm.logger import init_logger
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.spec_decode.tree_agreement import use_chains
from vllm.v1.worker.gpu.model_states.default import DefaultModelState

from .backends import why_layer_cannot
from .step import TreeStep

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

logger = init_logger(__name__)


def tree_step(runner: "GPUModelRunner") -> TreeStep | None:
    """The `TreeStep` of a runner, once its attention backends are known.

    Returns:
        None if no trees are drafted, or the target cannot verify them: then chains are
        drafted instead, and one log line says why.
    """
    step: TreeStep | None = getattr(runner.speculator, "tree_step", None)
    if step is None:
        return None
    layers = target_layers(runner)
    reason = why_no_trees(runner, layers)
    if reason is None:
        step.bind(runner, layers)
        return step
    use_chains(runner.vllm_config)
    runner.speculator.draft_chains()
    logger.warning(
        "Draft trees are not used: they cannot be verified with %s. Chains of %d "
        "tokens at most are drafted instead. Without that, trees are used.",
        reason,
        step.trees.max_depth,
    )
    return None


def target_layers(runner: "GPUModelRunner") -> dict[str, Any]:
    """The target's layers that keep KV or state, by name."""
    layers = get_layers_from_vllm_config(runner.vllm_config, AttentionLayerBase)
    drafts = runner.speculator.draft_attn_layer_names
    return {name: layer for name, layer in layers.items() if name not in drafts}


def why_no_trees(runner: "GPUModelRunner", layers: dict[str, Any]) -> str | None:
    """Why trees cannot be verified; None if they can."""
    config: VllmConfig = runner.vllm_config
    parallel, model = config.parallel_config, config.model_config
    mixed = config.compilation_config.cudagraph_mode.mixed_mode()
    reasons = {
        "pipeline parallelism": parallel.pipeline_parallel_size > 1,
        "context parallelism": parallel.decode_context_parallel_size > 1
        or parallel.prefill_context_parallel_size > 1,
        "batch-sharded sampling": parallel.enable_batch_sharded_sampling,
        "dual batch overlap": parallel.use_ubatching,
        "a KV connector": config.kv_transfer_config is not None,
        "returned sampling masks": model.return_sampling_mask,
        "returned routed experts": config.aux_output_config.enabled,
        "FULL CUDA graphs of mixed batches": mixed == CUDAGraphMode.FULL,
        "Mamba or linear-attention layers": model.has_inner_state,
        f"{type(runner.model_state).__name__}": type(runner.model_state)
        is not DefaultModelState,
    }
    found = next((reason for reason, holds in reasons.items() if holds), None)
    if found is not None:
        return found
    return next(filter(None, map(why_layer_cannot, layers.values())), None)
