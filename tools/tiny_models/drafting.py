# SPDX-License-Identifier: Apache-2.0
"""The bundled drafters in plain PyTorch, drafting behind many positions at once.

All positions of a text share one pass: its rows are the text and, for each position,
the rows behind it, which see their own text and each other but no other position's. So
each is what a decode step would draft there. Written for reading, not for speed.
"""

import json
from pathlib import Path
from typing import Protocol

import torch
from safetensors.torch import load_file
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel

from .settings import MASK_ID


class Drafter(Protocol):
    """A drafter of any kind.

    Attributes:
        is_parallel: drafts all depths in one pass, behind mask tokens.
        shift: a row holds the token so many places behind the one whose state it has.
    """

    is_parallel: bool
    shift: int

    def text_states(self, states: list[torch.Tensor]) -> torch.Tensor:
        """[tokens, size] that rows of the text are fed beside their tokens."""

    def mask_states(self, rows: int) -> torch.Tensor:
        """[rows, size] that rows of mask tokens are fed."""

    def run(
        self,
        tokens: torch.Tensor,
        states: torch.Tensor,
        positions: torch.Tensor,
        bias: torch.Tensor,
    ) -> torch.Tensor:
        """[rows, hidden] of all rows, before the last norm; `bias` [rows, rows]."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, vocab]; what cannot be drafted is -inf."""


def load_llama(folder: Path) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


class DraftModel:
    """A plain Llama: autoregressive, or PARD."""

    shift = 0

    def __init__(self, folder: Path, is_parallel: bool) -> None:
        self.model, self.is_parallel = load_llama(folder), is_parallel
        self.norm, self.model.model.norm = self.model.model.norm, nn.Identity()

    def text_states(self, states: list[torch.Tensor]) -> torch.Tensor:
        return states[0][:, :0]

    def mask_states(self, rows: int) -> torch.Tensor:
        return torch.empty(rows, 0)

    def run(self, tokens, states, positions, bias):
        out = self.model.model(
            input_ids=tokens[None],
            attention_mask=bias[None, None],
            position_ids=positions[None],
            use_cache=False,
        )
        return out.last_hidden_state[0]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.model.lm_head(self.norm(hidden))


class Head:
    """An EAGLE-3 or P-EAGLE head, as the speculators library saves them."""

    shift = 1

    def __init__(self, folder: Path, target: LlamaForCausalLM) -> None:
        config = json.loads((folder / "config.json").read_text())
        weights = load_file(folder / "model.safetensors")
        self.weights = {name: weight.float() for name, weight in weights.items()}
        self.is_parallel = "mask_hidden" in weights
        self.norm_before_residual = config["norm_before_residual"]
        self.aux_layers = config["eagle_aux_hidden_state_layer_ids"]
        self.draftable = weights["d2t"] + torch.arange(len(weights["d2t"]))
        self.model = _head_layers(
            LlamaConfig(**config["transformer_layer_config"]), self.weights
        )
        if "embed_tokens.weight" not in weights:
            self.model.embed_tokens = target.model.embed_tokens

    def text_states(self, states: list[torch.Tensor]) -> torch.Tensor:
        return self._project(torch.cat([states[i] for i in self.aux_layers], dim=-1))

    def mask_states(self, rows: int) -> torch.Tensor:
        return self._project(self.weights["mask_hidden"][0]).expand(rows, -1)

    def _project(self, states: torch.Tensor) -> torch.Tensor:
        return states @ self.weights["fc.weight"].T

    def run(self, tokens, states, positions, bias):
        model, bias = self.model, bias[None, None]
        states, embeds = states[None], model.embed_tokens(tokens)[None]
        rotary = model.rotary_emb(embeds, positions[None])
        first, *others = model.layers
        normed = first.hidden_norm(states)
        both = torch.cat([first.input_layernorm(embeds), normed], dim=-1)
        residual = normed if self.norm_before_residual else states
        attended, _ = first.self_attn(both, rotary, attention_mask=bias)
        hidden = residual + attended
        hidden = hidden + first.mlp(first.post_attention_layernorm(hidden))
        for layer in others:
            hidden = layer(hidden, attention_mask=bias, position_embeddings=rotary)
        return hidden[0]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        drafted = self.model.norm(hidden) @ self.weights["lm_head.weight"].T
        size = self.model.config.vocab_size
        every = drafted.new_full((len(drafted), size), -torch.inf)
        every[:, self.draftable] = drafted
        return every


def _head_layers(config: LlamaConfig, weights: dict[str, torch.Tensor]) -> LlamaModel:
    """A Llama whose first layer attends over a token's embedding and a state."""
    config._attn_implementation = "sdpa"
    model = LlamaModel(config)
    first, size = model.layers[0], config.hidden_size
    first.hidden_norm = type(first.input_layernorm)(size, config.rms_norm_eps)
    for name in ("q_proj", "k_proj", "v_proj"):
        out = getattr(first.self_attn, name).out_features
        setattr(first.self_attn, name, nn.Linear(2 * size, out, bias=False))
    own = model.state_dict().keys()
    missing = own - weights.keys() - {"embed_tokens.weight"}
    if missing:
        raise ValueError(f"a head without {', '.join(sorted(missing))}")
    model.load_state_dict({k: v for k, v in weights.items() if k in own}, strict=False)
    return model.eval()


DRAFTERS = ("pard", "peagle", "eagle3", "draft")


def load(name: str, models: Path, target: LlamaForCausalLM) -> Drafter:
    if name in ("pard", "draft"):
        return DraftModel(models / name, is_parallel=name == "pard")
    return Head(models / name, target)


def draft(
    drafter: Drafter,
    ids: torch.Tensor,
    states: list[torch.Tensor],
    positions: range,
    depth: int,
    width: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The likeliest tokens at each depth behind each position.

    Args:
        ids: [tokens], a text.
        states: [tokens, hidden] each, of the target, by layer as transformers counts.
        positions: n indices of `ids`, each the newest token of one draft.

    Returns:
        [n, depth, width] probabilities and token ids.
    """
    newest = torch.arange(positions.start, positions.stop) - drafter.shift
    tokens = ids[drafter.shift : positions.stop]
    fed = drafter.text_states(states)[: len(tokens)]
    way = _in_one_pass if drafter.is_parallel else _one_by_one
    found = way(drafter, tokens, fed, newest, depth, width)
    probs, best = zip(*found, strict=True)
    return torch.stack(probs, 1), torch.stack(best, 1)


def _in_one_pass(drafter, tokens, fed, newest, depth, width) -> list[tuple]:
    """Candidates by depth; the rows behind the text are masks."""
    length, masks = len(tokens), len(newest) * (depth - 1)
    anchor = torch.cat([torch.arange(length), newest.repeat(depth - 1)])
    level = torch.arange(1, depth).repeat_interleave(len(newest))
    level = torch.cat([torch.zeros(length, dtype=torch.long), level])
    hidden = drafter.run(
        torch.cat([tokens, tokens.new_full((masks,), MASK_ID)]),
        torch.cat([fed, drafter.mask_states(masks)]),
        anchor + level,
        _attention(anchor, level),
    )
    rows = torch.cat([hidden[newest], hidden[length:]]).split(len(newest))
    return [drafter.logits(row).softmax(-1).topk(width) for row in rows]


def _one_by_one(drafter, tokens, fed, newest, depth, width) -> list[tuple]:
    """Candidates by depth; the rows behind the text are the drafts so far."""
    n, found = len(newest), []
    anchor, level = torch.arange(len(tokens)), torch.zeros_like(tokens)
    for d in range(depth):
        hidden = drafter.run(tokens, fed, anchor + level, _attention(anchor, level))
        last = hidden[-n:]  # at first those of the text itself: positions end it
        found.append(drafter.logits(last).softmax(-1).topk(width))
        tokens = torch.cat([tokens, found[-1].indices[:, 0]])
        fed = torch.cat([fed, last[:, : fed.shape[1]]])  # a draft model is fed none
        anchor = torch.cat([anchor, newest])
        level = torch.cat([level, torch.full((n,), d + 1)])
    return found


def _attention(anchor: torch.Tensor, level: torch.Tensor) -> torch.Tensor:
    """[rows, rows] float, what is added to attention's scores: 0 or -inf.

    A row of level 0 is the text's token `anchor`; one of a higher level stands so far
    behind the text that ends at its anchor, and sees that and those before it.
    """
    text = (level == 0) & (anchor <= anchor[:, None])
    own = (anchor == anchor[:, None]) & (level > 0) & (level <= level[:, None])
    return torch.zeros(len(anchor), len(anchor)).masked_fill(~(text | own), -torch.inf)
