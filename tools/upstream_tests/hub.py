# SPDX-License-Identifier: Apache-2.0
"""Configs in place of the hub's: a cache folder that transformers reads offline."""

import json
from pathlib import Path

COMMIT = "0" * 40
LLAMA = dict(
    model_type="llama",
    architectures=["LlamaForCausalLM"],
    dtype="bfloat16",
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    max_position_embeddings=131072,
)
LLAMA_1B = LLAMA | dict(
    hidden_size=2048,
    intermediate_size=8192,
    num_hidden_layers=16,
    head_dim=64,
    tie_word_embeddings=True,
)
QWEN3 = dict(
    model_type="qwen3",
    architectures=["Qwen3ForCausalLM"],
    dtype="bfloat16",
    vocab_size=151936,
    hidden_size=4096,
    intermediate_size=12288,
    num_hidden_layers=36,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    max_position_embeddings=40960,
)
QWEN3_06B = QWEN3 | dict(
    hidden_size=1024,
    intermediate_size=3072,
    num_hidden_layers=28,
    num_attention_heads=16,
    tie_word_embeddings=True,
)
HEAD = LLAMA | dict(num_hidden_layers=1, max_position_embeddings=2048, dtype="float16")
CONFIGS = {
    "facebook/opt-125m": dict(
        model_type="opt", architectures=["OPTForCausalLM"], dtype="float16"
    ),
    "meta-llama/Llama-3.1-8B-Instruct": LLAMA,
    "meta-llama/Meta-Llama-3-8B-Instruct": LLAMA | dict(max_position_embeddings=8192),
    "meta-llama/Llama-3.2-1B-Instruct": LLAMA_1B,
    "meta-llama/Llama-3.2-1B": LLAMA_1B,
    "yuhuili/EAGLE-LLaMA3.1-Instruct-8B": HEAD,
    "yuhuili/EAGLE-LLaMA3-Instruct-8B": HEAD,
    "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B": HEAD | dict(draft_vocab_size=32000),
    "amd/PARD-Llama-3.2-1B": LLAMA_1B | dict(pard_token=128256),
    "Qwen/Qwen3-8B": QWEN3,
    "Qwen/Qwen3-0.6B": QWEN3_06B,
    "z-lab/Qwen3-8B-DFlash-b16": QWEN3
    | dict(
        architectures=["DFlashDraftModel"],
        num_hidden_layers=5,
        num_target_layers=36,
        block_size=16,
        dflash_config=dict(mask_token_id=151669, target_layer_ids=[1, 9, 17, 25, 33]),
    ),
    "RedHatAI/Qwen3-8B-speculator.eagle3": dict(
        architectures=["Eagle3Speculator"],
        speculators_model_type="eagle3",
        dtype="bfloat16",
        draft_vocab_size=32000,
        target_hidden_size=4096,
        norm_before_residual=True,
        transformer_layer_config=HEAD
        | dict(vocab_size=151936, intermediate_size=12288),
        speculators_config=dict(
            algorithm="eagle3",
            default_proposal_method="greedy",
            proposal_methods=[dict(proposal_type="greedy", speculative_tokens=3)],
            verifier=dict(
                name_or_path="Qwen/Qwen3-8B", architectures=["Qwen3ForCausalLM"]
            ),
        ),
    ),
}


def lay_hub(hub: Path) -> None:
    for name, config in CONFIGS.items():
        model = hub / f"models--{name.replace('/', '--')}"
        snapshot = model / "snapshots" / COMMIT
        snapshot.mkdir(parents=True, exist_ok=True)
        (snapshot / "config.json").write_text(json.dumps(config))
        (model / "refs").mkdir(exist_ok=True)
        (model / "refs" / "main").write_text(COMMIT)
