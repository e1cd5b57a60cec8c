# SPDX-License-Identifier: Apache-2.0
"""The target: a small Llama model trained on the corpus."""

import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from . import export, loop, tokenizer
from .settings import BOS_ID, EOS_ID, SHAPES, VOCAB_SIZE, Run, Shape


def llama_config(shape: Shape, **more: object) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=64,
        max_position_embeddings=2048,
        rms_norm_eps=1e-5,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
        pad_token_id=None,
        **more,
    )


def new_llama(name: str) -> LlamaForCausalLM:
    config = llama_config(SHAPES[name], tie_word_embeddings=True)
    config._attn_implementation = "sdpa"
    return LlamaForCausalLM(config)


def next_token_loss(model: LlamaForCausalLM, ids: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy of ``ids`` [batch, length] in nats per token."""
    logits = model(ids[:, :-1], use_cache=False).logits.float()
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def train(run: Run) -> None:
    plan = run.plan("target")
    ids = tokenizer.encode_corpus(run).to(run.device)
    loop.seed(1)
    model = new_llama("target").to(run.device)

    def batch_loss() -> torch.Tensor:
        return next_token_loss(model, loop.windows(ids, plan.batch, plan.length))

    loop.fit("target", model, batch_loss, plan, run.device)
    export.save_llama(run, "target", model)


def load(run: Run) -> LlamaForCausalLM:
    """The saved target, frozen: in fp32, with the weights rounded to bf16 as saved."""
    model = LlamaForCausalLM.from_pretrained(
        run.model_dir("target"), dtype=torch.float32, attn_implementation="sdpa"
    )
    return model.to(run.device).eval().requires_grad_(False)
