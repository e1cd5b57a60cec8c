# SPDX-License-Identifier: Apache-2.0
"""Greedy drafts of parallel drafters in plain PyTorch, with no engine and no cache.

An oracle writes a pass out as one causal sequence: the rows that hold known tokens,
then the masks. It follows the papers and shares no code with the engine.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import LlamaForCausalLM


def load_llama(folder: Path) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )


class PardOracle:
    """A language model whose masks stand for the tokens to come."""

    def __init__(self, folder: Path) -> None:
        self.model = load_llama(folder)
        self.mask = json.loads((folder / "config.json").read_text())["pard_token"]

    @torch.inference_mode()
    def drafts(self, known: list[int], count: int, width: int) -> list[int]:
        """`count` drafts after the known tokens, at most `width` of them a pass."""
        drafts: list[int] = []
        while len(drafts) < count:
            now = min(width, count - len(drafts))
            rows = known + drafts + [self.mask] * (now - 1)
            logits = self.model(torch.tensor([rows])).logits[0, -now:]
            drafts += logits.argmax(-1).tolist()
        return drafts


class _Rows(NamedTuple):
    tokens: list[int]
    hidden: torch.Tensor  # [len(tokens), H]


class PEagleOracle:
    """A head that pairs the hidden state of a token with the token after it."""

    def __init__(self, folder: Path, target: Path) -> None:
        self.target = load_llama(target)
        config = json.loads((folder / "config.json").read_text())
        self.mask, self.taps = (
            config["mask_token_id"],
            config["eagle_aux_hidden_state_layer_ids"],
        )
        self.shape: dict[str, Any] = config["transformer_layer_config"]
        weights = load_file(folder / "model.safetensors")
        self.to_target = weights.pop("d2t")
        self.weights = {name: w.float() for name, w in weights.items()}
        fused = self.weights["mask_hidden"].view(1, -1)
        self.mask_hidden = fused @ self.weights["fc.weight"].T

    @torch.inference_mode()
    def drafts(self, known: list[int], count: int, width: int) -> list[int]:
        """`count` drafts after the known tokens, at most `width` of them a pass."""
        rows, drafts = _Rows(known[1:], self._target_hidden(known[:-1])), []
        while len(drafts) < count:
            now = min(width, count - len(drafts))
            masks = [self.mask] * (now - 1)
            fed = torch.cat([rows.hidden, self.mask_hidden.expand(now - 1, -1)])
            out = self._forward(rows.tokens + masks, fed)[-now:]
            new = self._best(out)
            drafts += new
            # The next pass is fed the drafts, and what the head itself made of them.
            rows = _Rows(rows.tokens + new, torch.cat([rows.hidden, out]))
        return drafts

    def _target_hidden(self, tokens: list[int]) -> torch.Tensor:
        out = self.target(torch.tensor([tokens]), output_hidden_states=True)
        tapped = torch.cat([out.hidden_states[tap][0] for tap in self.taps], dim=-1)
        return tapped @ self.weights["fc.weight"].T

    def _best(self, hidden: torch.Tensor) -> list[int]:
        logits = self._norm(hidden, "norm") @ self.weights["lm_head.weight"].T
        best = logits.argmax(-1)
        return (best + self.to_target[best]).tolist()

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        weight = self.weights[f"{name}.weight"]
        return F.rms_norm(x, weight.shape, weight, self.shape["rms_norm_eps"])

    def _forward(self, tokens: list[int], hidden: torch.Tensor) -> torch.Tensor:
        """[n, H] of n rows, before the last norm."""
        embeds = self.weights["embed_tokens.weight"][tokens]
        for layer in range(self.shape["num_hidden_layers"]):
            at = f"layers.{layer}"
            if layer == 0:
                parts = (
                    self._norm(embeds, f"{at}.input_layernorm"),
                    self._norm(hidden, f"{at}.hidden_norm"),
                )
                normed = torch.cat(parts, dim=-1)
            else:
                normed = self._norm(hidden, f"{at}.input_layernorm")
            hidden = hidden + self._attention(normed, f"{at}.self_attn")
            normed = self._norm(hidden, f"{at}.post_attention_layernorm")
            hidden = hidden + self._mlp(normed, f"{at}.mlp")
        return hidden

    def _linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ self.weights[f"{name}.weight"].T

    def _mlp(self, x: torch.Tensor, at: str) -> torch.Tensor:
        gate = F.silu(self._linear(x, f"{at}.gate_proj"))
        return self._linear(gate * self._linear(x, f"{at}.up_proj"), f"{at}.down_proj")

    def _attention(self, x: torch.Tensor, at: str) -> torch.Tensor:
        size = self.shape["head_dim"]
        q, k, v = (
            self._linear(x, f"{at}.{name}_proj").unflatten(-1, (-1, size)).movedim(1, 0)
            for name in "qkv"
        )
        q, k = self._rotated(q), self._rotated(k)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self._linear(out.movedim(0, 1).flatten(1), f"{at}.o_proj")

    def _rotated(self, x: torch.Tensor) -> torch.Tensor:
        """Rotary positions 0 to n - 1 on [heads, n, head_dim]."""
        half = x.shape[-1] // 2
        theta = self.shape["rope_parameters"]["rope_theta"]
        rates = theta ** -(torch.arange(half) / half)
        angles = torch.arange(x.shape[1])[:, None] * rates
        cos, sin = angles.cos(), angles.sin()
        low, high = x[..., :half], x[..., half:]
        return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)
