# SPDX-License-Identifier: Apache-2.0
"""Model folders to benchmark: a config.json and nothing else, for dummy weights.

Speed depends on shapes, not on what the weights hold, so nothing is downloaded.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

BUNDLED = Path(__file__).resolve().parents[2] / "models"
TARGET = "target"
# Mode: what the speculative config says beside the model and the number of tokens.
MODES: dict[str, dict[str, Any]] = {
    "none": {},
    "draft": {"method": "draft_model"},
    "pard": {"method": "draft_model", "parallel_drafting": True},
    "eagle3": {"method": "eagle3"},
    "peagle": {"method": "eagle3", "parallel_drafting": True},
}
PARALLEL = ("pard", "peagle")
SETS = ("llama-3.1-8b", "tiny")

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
LLAMA_3_1_8B: dict[str, dict[str, Any]] = {
    TARGET: _LLAMA_3,
    "draft": _LLAMA_3 | _LLAMA_3_1B,
    "pard": _LLAMA_3 | _LLAMA_3_1B | {"pard_token": _UNUSED_TOKEN, "spd_type": "pard"},
    "eagle3": _LLAMA_3 | _EAGLE_3,
    "peagle": _LLAMA_3
    | _EAGLE_3
    | {"num_hidden_layers": 4, "ptd_token_id": _UNUSED_TOKEN},
}


def write_shapes(name: str, folder: Path) -> dict[str, Path]:
    """Writes a set of shapes below `folder`; returns the folder of each model.

    Raises:
        ValueError: there is no set of that name.
    """
    if name == "tiny":
        return {model: BUNDLED / model for model in (TARGET, *list(MODES)[1:])}
    if name != "llama-3.1-8b":
        raise ValueError(f"no shapes named {name!r}: choose one of {', '.join(SETS)}")
    for model, config in LLAMA_3_1_8B.items():
        (folder / model).mkdir(parents=True, exist_ok=True)
        (folder / model / "config.json").write_text(json.dumps(config, indent=1))
    return {model: folder / model for model in LLAMA_3_1_8B}


def speculative_config(
    mode: str, models: dict[str, Path], num_tokens: int, acceptance: Sequence[float]
) -> dict[str, Any] | None:
    """What an engine is started with; None without speculation.

    Args:
        acceptance: chance that drafts 1 to i are all accepted, drawn instead of
            verified, so that every engine accepts the same: [num_tokens].
    """
    if mode == "none":
        return None
    return {
        **MODES[mode],
        "model": str(models[mode]),
        "num_speculative_tokens": num_tokens,
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_rates": list(acceptance),
    }
