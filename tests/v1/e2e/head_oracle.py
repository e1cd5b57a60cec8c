# SPDX-License-Identifier: Apache-2.0
"""Greedy drafts of published drafters in plain PyTorch, from their files alone.

Reads every family's names, keys and norms by itself, and shares no code with the
engine or the detection.
"""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tests.checkpoints.families import Published

from .draft_oracle import PardOracle, PEagleOracle

MASK_KEYS = ("mask_token_id", "pard_token", "ptd_token_id")


def load_model(folder: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )


def read_config(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def choices(target: torch.nn.Module, tokens: list[int]) -> list[int]:
    """What the target alone would say after each of these tokens."""
    with torch.inference_mode():
        return target(torch.tensor([tokens])).logits[0].argmax(-1).tolist()


def oracle_for(
    made: Published, folder: Path, target: torch.nn.Module
) -> "PardOracle | HeadOracle":
    if made.warp is not None:
        return Pard2Oracle(folder, target, made.layers)
    if made.method == "draft_model":
        return ModelOracle(folder, target)
    depth = target.config.num_hidden_layers
    return HeadOracle(folder, target, made.layers or (2, depth // 2, depth - 3))


class ModelOracle(PardOracle):
    """A language model of any architecture, that drafts tokens of its target."""

    def __init__(self, folder: Path, target: torch.nn.Module) -> None:
        self.model = load_model(folder)
        self.mask = read_config(folder)["pard_token"]
        rows = self.model.get_output_embeddings()
        rows.weight.data[target.config.vocab_size :] = 0


class Pard2Oracle(ModelOracle):
    """A language model that is fed the target's states beside the tokens.

    Each token has the state of the token before it, the first one zeros; masks and
    drafts have the last one that there is.

    Args:
        folder: the drafter's.
        target: a transformers model.
        layers: of the states that transformers lists, those that it is fed, in order.
    """

    def __init__(
        self, folder: Path, target: torch.nn.Module, layers: tuple[int, ...]
    ) -> None:
        super().__init__(folder, target)
        self.target, self.layers = target, layers
        config = read_config(folder)
        self.scale = config.get("pard2_scale") or config["feat_scale"]
        warp = torch.load(folder / "warp_model.bin", weights_only=True)
        self.weight = warp["target_proj.weight"].float()
        self.bias = warp.get("target_proj.bias", torch.zeros(1)).float()

    @torch.inference_mode()
    def drafts(self, known: list[int], count: int, width: int) -> list[int]:
        states = torch.zeros(len(known), self.weight.shape[1])
        if len(known) > 1:
            ids = torch.tensor([known[:-1]])
            out = self.target(ids, output_hidden_states=True).hidden_states
            states[1:] = torch.cat([out[layer][0] for layer in self.layers], dim=-1)
        fed = (states @ self.weight.T + self.bias) * self.scale
        drafts: list[int] = []
        while len(drafts) < count:
            now = min(width, count - len(drafts))
            rows = torch.tensor(known + drafts + [self.mask] * (now - 1))
            more = fed[-1:].expand(len(rows) - len(fed), -1)
            embeds = self.model.get_input_embeddings()(rows) + torch.cat([fed, more])
            logits = self.model(inputs_embeds=embeds[None]).logits[0, -now:]
            drafts += logits.argmax(-1).tolist()
        return drafts


class HeadOracle(PEagleOracle):
    """An EAGLE-3 head of any family, parallel or not.

    Args:
        folder: the head's.
        target: a transformers model.
        layers: the target's layers whose inputs the head is fed.
    """

    def __init__(
        self, folder: Path, target: torch.nn.Module, layers: tuple[int, ...]
    ) -> None:
        config = read_config(folder)
        nested = config.get("transformer_layer_config", {})
        self.target, self.taps, self.config = target, layers, config
        self.shape = config | nested
        self.mask = next((config[k] for k in MASK_KEYS if k in config), None)
        weights = {_plain(n): w for n, w in _read_tensors(folder).items()}
        # Of layers too: a config may count the target's.
        layers_of = [re.match(r"layers\.(\d+)\.", name) for name in weights]
        depth = 1 + max(int(found[1]) for found in layers_of if found)
        self.shape |= {"num_hidden_layers": depth}
        table = weights.pop("d2t", None)
        self.weights = {name: w.float() for name, w in weights.items()}
        self.weights.setdefault(
            "embed_tokens.weight", target.get_input_embeddings().weight.detach()
        )
        rows = len(self.weights["lm_head.weight"])
        self.to_target = torch.zeros(rows, dtype=torch.long) if table is None else table
        self.rates, self.scale = self._rope()
        self.mask_hidden = torch.zeros(1, self.shape["hidden_size"])
        if "mask_hidden" in self.weights:
            self.mask_hidden = self._fused(self.weights["mask_hidden"].view(1, -1))

    def _rope(self) -> tuple[torch.Tensor, float]:
        shape = self.shape
        rope = shape.get("rope_parameters") or shape.get("rope_scaling") or {}
        theta = rope.get("rope_theta") or shape.get("rope_theta", 10000.0)
        size = shape.get("head_dim") or (
            shape["hidden_size"] // shape["num_attention_heads"]
        )
        self.shape = shape | {"head_dim": size}
        if rope.get("rope_type", "default") == "default":
            return theta ** -(torch.arange(0, size, 2) / size), 1.0
        config = SimpleNamespace(**self.shape)
        config.rope_parameters = rope | {"rope_theta": theta}
        config.standardize_rope_params = lambda: None
        return ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, "cpu")

    def _target_hidden(self, tokens: list[int]) -> torch.Tensor:
        out = self.target(torch.tensor([tokens]), output_hidden_states=True)
        tapped = [out.hidden_states[layer][0] for layer in self.taps]
        return self._fused(torch.cat(tapped, dim=-1))

    def _fused(self, tapped: torch.Tensor) -> torch.Tensor:
        if self.config.get("norm_before_fc"):
            tapped = self._norm(tapped, "input_norm")
        if self.config.get("fc_norm"):
            parts = tapped.chunk(len(self.taps), dim=-1)
            normed = [self._norm(x, f"fc_norm.{i}") for i, x in enumerate(parts)]
            tapped = torch.cat(normed, dim=-1)
        return self._linear(tapped, "fc")

    def _forward(self, tokens: list[int], hidden: torch.Tensor) -> torch.Tensor:
        """[n, H] of n rows: before the last norm, or after it where it is fed back."""
        if self.config.get("norm_before_residual"):
            # The residual starts from the normed state, which norming again changes.
            embeds = self.weights["embed_tokens.weight"][tokens]
            hidden = self._norm(hidden, "layers.0.hidden_norm")
            normed = torch.cat(
                [self._norm(embeds, "layers.0.input_layernorm"), hidden], dim=-1
            )
            out = self._layer(0, hidden, normed)
            for layer in range(1, self.shape["num_hidden_layers"]):
                normed = self._norm(out, f"layers.{layer}.input_layernorm")
                out = self._layer(layer, out, normed)
        else:
            out = super()._forward(tokens, hidden)
        return self._norm(out, "norm") if self.config.get("norm_output") else out

    def _layer(
        self, layer: int, hidden: torch.Tensor, normed: torch.Tensor
    ) -> torch.Tensor:
        at = f"layers.{layer}"
        hidden = hidden + self._attention(normed, f"{at}.self_attn")
        normed = self._norm(hidden, f"{at}.post_attention_layernorm")
        return hidden + self._mlp(normed, f"{at}.mlp")

    def _best(self, hidden: torch.Tensor) -> list[int]:
        if self.config.get("norm_output"):  # normed already
            best = self._linear(hidden, "lm_head").argmax(-1)
            return (best + self.to_target[best]).tolist()
        return super()._best(hidden)

    def _attention(self, x: torch.Tensor, at: str) -> torch.Tensor:
        self.at = at
        return super()._attention(x, at)

    def _rotated(self, x: torch.Tensor) -> torch.Tensor:
        """Rotary positions 0 to n - 1 on [heads, n, head_dim], normed for Qwen3."""
        if f"{self.at}.q_norm.weight" in self.weights:
            # Queries have more heads than keys in every head of a Qwen3 here.
            is_query = len(x) == self.shape["num_attention_heads"]
            x = self._norm(x, f"{self.at}.{'q' if is_query else 'k'}_norm")
        angles = torch.arange(x.shape[1])[:, None] * self.rates
        cos, sin = angles.cos() * self.scale, angles.sin() * self.scale
        low, high = x.chunk(2, dim=-1)
        return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)


def _read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    pickled = folder / "pytorch_model.bin"
    if pickled.is_file():
        return torch.load(pickled, weights_only=True)
    return load_file(folder / "model.safetensors")


def _plain(name: str) -> str:
    name = re.sub(r"^model\.", "", name)
    name = re.sub(r"^midlayer\.(\d+)\.", r"layers.\1.", name)
    return name.replace("midlayer.", "layers.0.")
