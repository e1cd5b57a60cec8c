# SPDX-License-Identifier: Apache-2.0
"""Targets and drafters in plain PyTorch, without an engine or a KV cache.

A drafter is read from its files alone, with the names, keys and norms of every family.
A pass is one causal sequence: rows of known tokens, then masks. The code follows the
papers, and shares none with the engine or the detection of drafters.
"""

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from tests.checkpoints.families import Published
from vllm import SamplingParams

from .noise import noised
from .runner import Request, Served

MASK_KEYS = ("mask_token_id", "pard_token", "ptd_token_id")


def load_model(folder: Path) -> nn.Module:
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )


def read_config(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


@torch.inference_mode()
def own_tokens(
    target: nn.Module, text: list[int], first: int, params: SamplingParams
) -> list[int]:
    """The target's own token at each index from `first` on, greedy or with a seed."""
    rows = target(torch.tensor([text])).logits[0, first - 1 : -1]
    if params.seed is None:
        return rows.argmax(-1).tolist()
    sampling = {"seed": params.seed, "temperature": params.temperature}
    drawn = (
        noised(row, position=position, **sampling).argmax()
        for position, row in enumerate(rows, first - 1)
    )
    return [int(token) for token in drawn]


def assert_output_matches(
    target: nn.Module, requests: list[Request], served: Served
) -> None:
    """Asserts that outputs, greedy or with a seed, are those of the target alone.

    An aborted request must have its tokens up to the abort, every other one all.
    """
    for request, output in zip(requests, served.outputs, strict=True):
        answer = list(output.outputs[0].token_ids)
        assert not output.finished or len(answer) == request.params.max_tokens
        text, first = request.prompt + answer, len(request.prompt)
        assert answer == own_tokens(target, text, first, request.params)


def compare_drafts(
    drafts: list[tuple[int, int, list[int]]],
    texts: list[list[int]],
    oracle: "ModelOracle | HeadOracle",
    width: int,  # drafts per pass
    every: int = 1,
    limit: int = 1 << 30,  # drafts from this position on are ignored
) -> int:
    """Compares recorded drafts with plain PyTorch; returns the number compared."""
    compared = 0
    for request, known, drafted in drafts[::every]:
        text = texts[request]
        count = min(len(drafted), limit - known)
        if known > len(text) or count < 1:
            continue  # past the last token kept
        wanted = oracle.drafts(text[:known], count, width)
        assert drafted[:count] == wanted, f"request {request} after {known} tokens"
        compared += 1
    return compared


def oracle_for(
    made: Published, folder: Path, target: nn.Module
) -> "ModelOracle | HeadOracle":
    if made.warp is not None:
        return Pard2Oracle(folder, target, made.layers)
    if made.method == "draft_model":
        return ModelOracle(folder, target)
    depth = target.config.num_hidden_layers
    return HeadOracle(folder, target, made.layers or (2, depth // 2, depth - 3))


class ModelOracle:
    """A draft model, autoregressive or with masks for several tokens per pass."""

    def __init__(self, folder: Path, target: nn.Module) -> None:
        self.model, self.config = load_model(folder), read_config(folder)
        self.mask = self.config.get("pard_token")
        rows = self.model.get_output_embeddings()
        rows.weight.data[target.config.vocab_size :] = 0

    @torch.inference_mode()
    def drafts(self, known: list[int], count: int, width: int) -> list[int]:
        """`count` drafts after the known tokens, at most `width` of them per pass."""
        fed, drafts = self._fed(known), []
        while len(drafts) < count:
            now = min(width, count - len(drafts))
            rows = torch.tensor(known + drafts + [self.mask] * (now - 1))
            more = fed[-1:].expand(len(rows) - len(fed), -1)
            embeds = self.model.get_input_embeddings()(rows) + torch.cat([fed, more])
            logits = self.model(inputs_embeds=embeds[None]).logits[0, -now:]
            drafts += logits.argmax(-1).tolist()
        return drafts

    def _fed(self, known: list[int]) -> torch.Tensor:
        """[n, H or 1], added to the embeddings of n known tokens."""
        return torch.zeros(len(known), 1)


class Pard2Oracle(ModelOracle):
    """A draft model that is fed the target's hidden states in addition to tokens.

    Each token has the state of the preceding token, and the first one zeros; masks and
    drafts have the last known state. Layers are numbered as in transformers.
    """

    def __init__(
        self, folder: Path, target: nn.Module, layers: tuple[int, ...]
    ) -> None:
        super().__init__(folder, target)
        self.target, self.layers = target, layers
        self.scale = self.config.get("pard2_scale") or self.config["feat_scale"]
        warp = torch.load(folder / "warp_model.bin", weights_only=True)
        self.weight = warp["target_proj.weight"].float()
        self.bias = warp.get("target_proj.bias", torch.zeros(1)).float()

    def _fed(self, known: list[int]) -> torch.Tensor:
        states = torch.zeros(len(known), self.weight.shape[1])
        if len(known) > 1:
            ids = torch.tensor([known[:-1]])
            out = self.target(ids, output_hidden_states=True).hidden_states
            states[1:] = torch.cat([out[layer][0] for layer in self.layers], dim=-1)
        return (states @ self.weight.T + self.bias) * self.scale


class _Rows(NamedTuple):
    tokens: list[int]
    hidden: torch.Tensor  # [len(tokens), H]


class HeadOracle:
    """An EAGLE-3 head of any family, parallel or not, that is fed inputs of `layers`.

    It pairs the hidden state of a token with the next token.
    """

    def __init__(
        self, folder: Path, target: nn.Module, layers: tuple[int, ...]
    ) -> None:
        config = read_config(folder)
        self.target, self.taps, self.config = target, layers, config
        self.shape = config | config.get("transformer_layer_config", {})
        self.mask = next((config[k] for k in MASK_KEYS if k in config), None)
        weights = {_plain(n): w for n, w in _read_tensors(folder).items()}
        table = weights.pop("d2t", None)
        self.weights = {name: w.float() for name, w in weights.items()}
        for name, shared in {
            "embed_tokens": target.get_input_embeddings(),
            "lm_head": target.get_output_embeddings(),
        }.items():
            self.weights.setdefault(f"{name}.weight", shared.weight.detach())
        rows = len(self.weights["lm_head.weight"])
        self.to_target = torch.zeros(rows, dtype=torch.long) if table is None else table
        self.layers, self.rope = self._transformer()
        self.mask_hidden = torch.zeros(1, self.shape["hidden_size"])
        if "mask_hidden" in self.weights:
            self.mask_hidden = self._fused(self.weights["mask_hidden"].view(1, -1))

    @torch.inference_mode()
    def drafts(self, known: list[int], count: int, width: int) -> list[int]:
        """`count` drafts after the known tokens, at most `width` of them per pass."""
        rows, drafts = _Rows(known[1:], self._target_hidden(known[:-1])), []
        while len(drafts) < count:
            now = min(width, count - len(drafts))
            masks = [self.mask] * (now - 1)
            fed = torch.cat([rows.hidden, self.mask_hidden.expand(now - 1, -1)])
            out = self._forward(rows.tokens + masks, fed)[-now:]
            new = self._best(out)
            drafts += new
            # The next pass is fed the drafts, and the head's own hidden states.
            rows = _Rows(rows.tokens + new, torch.cat([rows.hidden, out]))
        return drafts

    def _transformer(self) -> tuple[nn.ModuleList, nn.Module]:
        """Layers and rotary embedding; the first layer's projections may be wider."""
        own = {n: w for n, w in self.weights.items() if n.startswith("layers.")}
        # Counted by their weights: a config may have the target's number.
        depth = 1 + max(int(name.split(".")[1]) for name in own)
        kind = self.shape["model_type"].removesuffix("_peagle")
        changes = {"model_type": kind, "num_hidden_layers": depth}
        config = AutoConfig.for_model(**self.shape | changes)
        model = AutoModel.from_config(config, dtype=torch.float32)
        for name in ("q_proj", "k_proj", "v_proj"):
            rows, columns = own[f"layers.0.self_attn.{name}.weight"].shape
            projection = nn.Linear(columns, rows, bias=False)
            setattr(model.layers[0].self_attn, name, projection)
        model.load_state_dict(own, strict=False)
        return model.layers, model.rotary_emb

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
        """[n, H] of n rows, before the last norm, or after it with `norm_output`."""
        embeds = self._embeddings(tokens)
        normed = self._norm(hidden, "layers.0.hidden_norm")
        if self.config.get("norm_before_residual"):
            hidden = normed
        embeds = self._norm(embeds, "layers.0.input_layernorm")
        out = self._layer(0, hidden, torch.cat([embeds, normed], dim=-1))
        for layer in range(1, len(self.layers)):
            normed = self._norm(out, f"layers.{layer}.input_layernorm")
            out = self._layer(layer, out, normed)
        return self._norm(out, "norm") if self.config.get("norm_output") else out

    def _embeddings(self, tokens: list[int]) -> torch.Tensor:
        return self.weights["embed_tokens.weight"][tokens]

    def _layer(
        self, number: int, hidden: torch.Tensor, normed: torch.Tensor
    ) -> torch.Tensor:
        layer, places = self.layers[number], torch.arange(len(hidden))[None]
        attended, _ = layer.self_attn(
            normed[None],
            position_embeddings=self.rope(hidden, places),
            attention_mask=None,  # causal
        )
        hidden = hidden + attended[0]
        return hidden + layer.mlp(layer.post_attention_layernorm(hidden))

    def _best(self, hidden: torch.Tensor) -> list[int]:
        if not self.config.get("norm_output"):  # otherwise it is normed already
            hidden = self._norm(hidden, "norm")
        best = self._linear(hidden, "lm_head").argmax(-1)
        return (best + self.to_target[best]).tolist()

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        weight = self.weights[f"{name}.weight"]
        return F.rms_norm(x, weight.shape, weight, self.shape["rms_norm_eps"])

    def _linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ self.weights[f"{name}.weight"].T


class EagleOracle(HeadOracle):
    """An EAGLE head of the first version (arXiv:2401.15077).

    It is fed the target's hidden states after the last norm, and has no norm itself.
    """

    def __init__(self, folder: Path, target: nn.Module) -> None:
        super().__init__(folder, target, layers=(-1,))

    def _fused(self, tapped: torch.Tensor) -> torch.Tensor:
        return tapped

    def _forward(self, tokens: list[int], hidden: torch.Tensor) -> torch.Tensor:
        embeds = self._embeddings(tokens)
        mixed = self._linear(torch.cat([embeds, hidden], dim=-1), "fc")
        return self._layer(0, mixed, mixed)

    def _best(self, hidden: torch.Tensor) -> list[int]:
        return self._linear(hidden, "lm_head").argmax(-1).tolist()


def _read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    pickled = folder / "pytorch_model.bin"
    if pickled.is_file():
        return torch.load(pickled, weights_only=True)
    return load_file(folder / "model.safetensors")


def _plain(name: str) -> str:
    name = re.sub(r"^model\.", "", name)
    name = re.sub(r"^midlayer\.(\d+)\.", r"layers.\1.", name)
    return name.replace("midlayer.", "layers.0.")
