# SPDX-License-Identifier: Apache-2.0
"""What the config.json of published models says of their shapes.

A set is a target and drafters for it, by mode.
"""

from typing import Any

Config = dict[str, Any]
TARGET = "target"

_LLAMA_3 = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "attention_bias": False,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "dtype": "bfloat16",
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "tie_word_embeddings": False,
    "vocab_size": 128256,
}
_LLAMA_3_1B = {
    "head_dim": 64,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "tie_word_embeddings": True,
}
# A head reads three of the target's layers and ranks a quarter of its vocabulary.
_EAGLE_3 = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "draft_vocab_size": 32000,
    "num_hidden_layers": 1,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
}
_UNUSED_TOKEN = 128002
_PARD = {"pard_token": _UNUSED_TOKEN, "spd_type": "pard"}


def _pard2(target: Config, mask_token: int) -> Config:
    """Keys of a PARD-2 drafter: it is fed four states of the target's layers."""
    layers = [-1, -8, -16, -24]
    return {
        "pard2": True,
        "spd_type": "pard2",
        "pard_token": mask_token,
        "pard2_proj_bias": False,
        "pard2_scale": 0.02,
        "pard2_target_dim": len(layers) * target["hidden_size"],
        "pard2_target_layers": layers,
    }


LLAMA_3_1_8B: dict[str, Config] = {
    TARGET: _LLAMA_3,
    "draft": _LLAMA_3 | _LLAMA_3_1B,
    "pard": _LLAMA_3 | _LLAMA_3_1B | _PARD,
    "pard2": _LLAMA_3 | _LLAMA_3_1B | _pard2(_LLAMA_3, _UNUSED_TOKEN),
    "eagle3": _LLAMA_3 | _EAGLE_3,
    "peagle": _LLAMA_3
    | _EAGLE_3
    | {"num_hidden_layers": 4, "ptd_token_id": _UNUSED_TOKEN},
}

_QWEN_3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": False,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "dtype": "bfloat16",
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "max_position_embeddings": 40960,
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
_QWEN_3_600M = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "tie_word_embeddings": True,
}
QWEN_3_8B: dict[str, Config] = {
    TARGET: _QWEN_3,
    "pard2": _QWEN_3 | _QWEN_3_600M | _pard2(_QWEN_3, mask_token=151670),
}

_GPT_OSS = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "attention_bias": True,
    "dtype": "bfloat16",
    "eos_token_id": 200002,
    "pad_token_id": 199999,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "quantization_config": {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
    },
    "rms_norm_eps": 1e-5,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 150000.0,
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "original_max_position_embeddings": 4096,
        "truncate": False,
    },
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "vocab_size": 201088,
}
# Unlike heads of other families it ranks the target's whole vocabulary.
_GPT_OSS_PEAGLE = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "attention_bias": False,
    "mlp_bias": False,
    "dtype": "bfloat16",
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "num_attention_heads": 64,
    "num_hidden_layers": 4,
    "num_key_value_heads": 8,
    "ptd_token_id": 201020,
    "rms_norm_eps": 1e-5,
    "rope_parameters": _LLAMA_3["rope_parameters"],
    "tie_word_embeddings": False,
    "draft_vocab_size": 201088,
    "vocab_size": 201088,
}
GPT_OSS_20B: dict[str, Config] = {TARGET: _GPT_OSS, "peagle": _GPT_OSS_PEAGLE}
