# SPDX-License-Identifier: Apache-2.0
"""What a CPU's kernels cannot run if they are of an older release than the Python.

See `[cpu.kernels]` in base.toml: each op that it lists as outdated is refused here.
"""

import torch

from vllm.config import ModelConfig, VllmConfig


def check_kernels(vllm_config: VllmConfig) -> None:
    """Raises ValueError for models that need newer kernels."""
    spec = vllm_config.speculative_config
    for config in (vllm_config.model_config, spec and spec.draft_model_config):
        if config is not None:
            _check_quantized_experts(config)


def _check_quantized_experts(config: ModelConfig) -> None:
    """vLLM 0.33.0 passes the activation to this op; older kernels do not take it."""
    if not (config.quantization and config.is_moe):
        return
    import vllm._custom_ops  # noqa: F401 - loads the kernels

    op = getattr(torch.ops._C, "fused_experts_cpu", None)
    schema = op and op.default._schema
    if schema and all(argument.name != "act_method" for argument in schema.arguments):
        raise ValueError(
            f"{config.model} is a quantized mixture-of-experts model "
            f"({config.quantization}), which the CPU kernels of this build cannot run: "
            "they are of an older vLLM release. Serve it unquantized, or on a GPU."
        )
