# SPDX-License-Identifier: Apache-2.0
"""Tokens a step that an EAGLE-3 head would give with trees of several beams.

Each draft pass continues the likeliest open nodes, as EAGLE-2 does; with one beam this
is the chain with siblings that the engine drafts. The best N of all nodes that were
scored are the tree. The target's text is given, and a step accepts the nodes that it
goes on with: sampled text too, since without draft probabilities the target samples at
each node, and goes on while a child has its token.
"""

import json
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import torch
from safetensors.torch import load_file
from torch.nn import functional as F
from transformers import AutoTokenizer

from vllm.benchmarks.drafters.prompts import encode_chat

from .heads import LAYERS
from .questions import questions as read

WIDTHS, NODES, DEPTHS = (1, 2, 4, 8), (15, 31, 63), (4, 5, 6, 7, 8)
CANDIDATES = 8  # of a row, among which its probabilities are normalized: as the engine
WALKS = 8  # of each answer, which begin at its first tokens
CHAIN = "chain"
ABOUT = "Steps, and what they accept: python -m tools.real_model width"
PLACE, SETTING = ["temperature", "questions"], ["beams", "depth", "nodes"]
FLAGS = ("norm_before_residual", "norm_before_fc", "norm_output")
Past = tuple[torch.Tensor, torch.Tensor]  # KV, [texts, rows, heads, head size]


class Level(NamedTuple):
    """Nodes of one depth, [steps, open nodes * CANDIDATES] each."""

    tokens: torch.Tensor
    scores: torch.Tensor  # log-probability of the path
    parents: torch.Tensor  # among all nodes; -1: the newest token


class Head:
    """An EAGLE-3 head of one layer, as speculators trains it by default."""

    def __init__(self, folder: Path):
        config = json.loads((folder / "config.json").read_text())
        layer = config["transformer_layer_config"]
        assert layer["num_hidden_layers"] == 1 and all(config[f] for f in FLAGS)
        tensors = load_file(folder / "model.safetensors")
        self.weights = {
            name.removeprefix("layers.0.").removesuffix(".weight"): tensor.float()
            for name, tensor in tensors.items()
        }
        self.eps, self.size = layer["rms_norm_eps"], layer["head_dim"]
        reduced = tensors["d2t"]
        self.targets = torch.arange(len(reduced)) + reduced
        exponents = torch.arange(0, self.size, 2) / self.size
        self.frequencies = layer["rope_parameters"]["rope_theta"] ** -exponents

    def features(self, states: torch.Tensor) -> torch.Tensor:
        """[rows, hidden size] from the target's states, [rows, layers, hidden size]."""
        return self._linear(self._norm(states.flatten(1), "input_norm"), "fc")

    def candidates(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities and tokens, [..., CANDIDATES], best first."""
        logits, best = self._linear(hidden, "lm_head").topk(CANDIDATES)
        return F.log_softmax(logits, dim=-1), self.targets[best]

    def run(
        self,
        tokens: torch.Tensor,
        features: torch.Tensor,
        positions: torch.Tensor,
        seen: torch.Tensor,
        past: Past | None = None,
    ) -> tuple[torch.Tensor, Past]:
        """Hidden states, which are the features of the next rows, and all rows' KV.

        Args:
            tokens: [texts, rows], as `positions`; features have a last dimension more.
            seen: [texts, rows, past rows + rows], which rows are attended to.
        """
        embeds = F.embedding(tokens, self.weights["embed_tokens"])
        embeds = self._norm(embeds, "input_layernorm")
        residual = self._norm(features, "hidden_norm")
        rows = torch.cat([embeds, residual], dim=-1)
        query, key, value = (
            self._linear(rows, f"self_attn.{each}_proj").unflatten(-1, (-1, self.size))
            for each in "qkv"
        )
        keys, values = self._rotate(key, positions), value
        if past is not None:
            keys, values = (
                torch.cat(pair, 1) for pair in zip(past, (keys, values), strict=True)
            )
        attended = F.scaled_dot_product_attention(
            self._rotate(query, positions).transpose(1, 2),
            keys.transpose(1, 2),
            values.transpose(1, 2),
            attn_mask=seen[:, None],
            enable_gqa=True,
        )
        attended = attended.transpose(1, 2).flatten(2)
        residual = residual + self._linear(attended, "self_attn.o_proj")
        rows = self._norm(residual, "post_attention_layernorm")
        gate = F.silu(self._linear(rows, "mlp.gate_proj"))
        rows = gate * self._linear(rows, "mlp.up_proj")
        residual = residual + self._linear(rows, "mlp.down_proj")
        return self._norm(residual, "norm"), (keys, values)

    def _linear(self, rows: torch.Tensor, name: str) -> torch.Tensor:
        return F.linear(rows, self.weights[name])

    def _norm(self, rows: torch.Tensor, name: str) -> torch.Tensor:
        return F.rms_norm(rows, rows.shape[-1:], self.weights[name], self.eps)

    def _rotate(self, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        angles = (positions[..., None] * self.frequencies)[:, :, None]
        first, second = rows.chunk(2, dim=-1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def grow(
    head: Head,
    ids: torch.Tensor,
    states: torch.Tensor,
    starts: torch.Tensor,
    width: int,
) -> Iterator[Level]:
    """Scores the nodes of all depths, for steps whose newest token is at `starts`."""
    rows = torch.arange(len(ids) - 1)
    features, causal = head.features(states[:-1])[None], rows <= rows[:, None]
    hidden, past = head.run(ids[None, 1:], features, rows[None], causal[None])
    hidden = hidden[0, starts - 1][:, None]
    past = tuple(each.expand(len(starts), -1, -1, -1) for each in past)
    seen = (rows < starts[:, None])[:, None]
    score, count = torch.zeros(len(starts), 1), 0
    node = torch.full((len(starts), 1), -1)
    for depth in range(1, DEPTHS[-1] + 1):
        log_probs, tokens = head.candidates(hidden)
        scores, tokens = (score[..., None] + log_probs).flatten(1), tokens.flatten(1)
        yield Level(tokens, scores, node.repeat_interleave(CANDIDATES, 1))
        score, picked = scores.topk(width)
        node, count = count + picked, count + tokens.shape[1]
        above = (picked // CANDIDATES)[..., None]
        itself = torch.eye(width, dtype=torch.bool).expand(len(starts), -1, -1)
        seen = torch.cat([seen.take_along_dim(above, 1), itself], dim=-1)
        positions = (starts - 1 + depth)[:, None].expand_as(picked)
        features = hidden.take_along_dim(above, 1)
        hidden, past = head.run(
            tokens.gather(1, picked), features, positions, seen, past
        )


def accepted(
    levels: list[Level], ids: torch.Tensor, starts: torch.Tensor, nodes: int | None
) -> torch.Tensor:
    """Nodes that each step accepts of its best `nodes`, or of the chain, [steps]."""
    scores = torch.cat([level.scores for level in levels], dim=1)
    if nodes is None:
        kept = (torch.arange(scores.shape[1]) % CANDIDATES == 0).expand_as(scores)
    else:
        kept = torch.zeros_like(scores, dtype=torch.bool)
        kept.scatter_(1, scores.topk(min(nodes, scores.shape[1])).indices, True)
    at, count, offset = torch.full((len(starts), 1), -1), torch.zeros(len(starts)), 0
    for depth, level in enumerate(levels, 1):
        hits = (level.tokens == ids[starts + depth][:, None]) & (level.parents == at)
        hits &= kept[:, offset : offset + hits.shape[1]]
        # What no node has: nothing below it is accepted.
        found = torch.where(hits.any(1), offset + hits.int().argmax(1), -2)
        at, offset = found[:, None], offset + hits.shape[1]
        count += hits.any(1)
    return count.int()


def walk(counts: list[int]) -> Iterator[int]:
    """The accepted nodes of the steps that are made, in walks from the first tokens."""
    for at in range(min(WALKS, len(counts))):
        while at < len(counts):
            yield counts[at]
            at += counts[at] + 1


def settings(
    head: Head, ids: torch.Tensor, states: torch.Tensor, asked: int
) -> Iterator[dict[str, int | str]]:
    """By beams, depth and nodes: steps of an answer, and what they accept.

    Args:
        asked: tokens of the prompt; the next one is the first step's newest token.
    """
    starts = torch.arange(asked, len(ids) - DEPTHS[-1])
    for width in WIDTHS:
        levels = list(grow(head, ids, states, starts, width))
        for depth, nodes in product(DEPTHS, (None, *NODES)):
            if nodes is None and width > 1:
                continue
            counts = list(walk(accepted(levels[:depth], ids, starts, nodes).tolist()))
            setting = zip(SETTING, (width, depth, str(nodes or CHAIN)), strict=True)
            yield dict(setting) | {"accepted": sum(counts), "steps": len(counts)}


def texts(
    model: Path, questions: Path, result: dict[str, Any]
) -> Iterator[tuple[dict[str, str], list[int], list[int]]]:
    """Temperature and questions, prompt and answer, of a result of `evaluate none`."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    for temperature, sets in result["temperatures"].items():
        for each, row in sets.items():
            asked = read(questions, each)[: len(row["answers"])]
            place = {"temperature": temperature, "questions": each}
            for question, answer in zip(asked, row["answers"], strict=True):
                if len(answer) > DEPTHS[-1]:
                    yield place, encode_chat(tokenizer, question), answer


@torch.inference_mode()
def measure(model: Path, questions: Path, head: Path, text: Path, out: Path) -> str:
    """Writes what steps accept by text and setting, and returns a table.

    Args:
        text: a result of `evaluate none`, whose answers the target wrote.
    """
    from .states import States  # only here, tests do without what it imports

    drafter, states = Head(head), States(model, "cpu")
    rows = []
    for place, prompt, answer in texts(model, questions, json.loads(text.read_text())):
        ids = torch.tensor(prompt + answer)
        kept = states.of([ids])[0, :, : len(LAYERS)]
        rows += [place | row for row in settings(drafter, ids, kept, len(prompt))]
    found = pd.DataFrame(rows).groupby([*PLACE, *SETTING], as_index=False).sum()
    stored = {"about": ABOUT, "points": found.to_dict("records")}
    out.write_text(json.dumps(stored).replace("},", "},\n") + "\n")
    return tokens_a_step(found).round(2).reset_index().to_markdown(index=False)


def tokens_a_step(found: pd.DataFrame) -> pd.DataFrame:
    """Of all questions, by temperature, beams and depth; nodes are the columns."""
    keys = [PLACE[0], *SETTING]
    sums = found.groupby(keys)[["accepted", "steps"]].sum()
    table = 1 + (sums["accepted"] / sums["steps"]).unstack("nodes")
    return table[[CHAIN, *map(str, NODES)]]
