# SPDX-License-Identifier: Apache-2.0
"""Beams: a node's score is its path's own, and the text's nodes are accepted."""

import json

import pytest
import torch
from safetensors.torch import save_file

from tools.real_model import width

VOCAB, HIDDEN, SIZE = 24, 8, 4
SHAPES = {
    "embed_tokens": (2 * VOCAB, HIDDEN),
    "fc": (HIDDEN, 2 * HIDDEN),
    "lm_head": (VOCAB, HIDDEN),
    "layers.0.self_attn.q_proj": (2 * SIZE, 2 * HIDDEN),
    "layers.0.self_attn.k_proj": (SIZE, 2 * HIDDEN),
    "layers.0.self_attn.v_proj": (SIZE, 2 * HIDDEN),
    "layers.0.self_attn.o_proj": (HIDDEN, 2 * SIZE),
    "layers.0.mlp.gate_proj": (HIDDEN, HIDDEN),
    "layers.0.mlp.up_proj": (HIDDEN, HIDDEN),
    "layers.0.mlp.down_proj": (HIDDEN, HIDDEN),
}
NORMS = "hidden_norm", "input_layernorm", "post_attention_layernorm"


@pytest.fixture
def head(tmp_path) -> width.Head:
    torch.manual_seed(0)
    tensors = {f"{name}.weight": torch.randn(shape) for name, shape in SHAPES.items()}
    names = "norm", *(f"layers.0.{name}" for name in NORMS)
    tensors |= {f"{name}.weight": torch.ones(HIDDEN) for name in names}
    tensors["input_norm.weight"] = torch.ones(2 * HIDDEN)
    tensors["d2t"] = torch.arange(VOCAB)  # every second token
    save_file(tensors, tmp_path / "model.safetensors")
    layer = {"num_hidden_layers": 1, "rms_norm_eps": 1e-6, "head_dim": SIZE}
    layer["rope_parameters"] = {"rope_theta": 1e4}
    config = dict.fromkeys(width.FLAGS, True) | {"transformer_layer_config": layer}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return width.Head(tmp_path)


@pytest.mark.parametrize("beams", [1, 3])
def test_scores_are_those_of_the_path_alone(head, beams):
    ids, states = torch.randint(2 * VOCAB, (9,)), torch.randn(9, 2, HIDDEN)
    starts = torch.tensor([3, 6])
    levels = list(width.grow(head, ids, states, starts, beams))
    scores = torch.cat([level.scores for level in levels], dim=1)
    tokens = torch.cat([level.tokens for level in levels], dim=1)
    parents = torch.cat([level.parents for level in levels], dim=1)
    for step, start in enumerate(starts.tolist()):
        node = int(scores.shape[1] - width.CANDIDATES * beams + 2)  # of the last level
        path = []
        while node >= 0:
            path.insert(0, node)
            node = int(parents[step, node])
        rows = torch.arange(start)
        seen = (rows <= rows[:, None])[None]
        features = head.features(states[:start])[None]
        hidden, past = head.run(ids[None, 1 : start + 1], features, rows[None], seen)
        total = 0.0
        for depth, node in enumerate(path):
            hidden = hidden[:, -1:]
            log_probs, best = head.candidates(hidden)
            token = tokens[step, node]
            total += log_probs[best == token].item()
            assert scores[step, node].item() == pytest.approx(total, abs=1e-4)
            at = torch.tensor([[start + depth]])
            seen = torch.ones(1, 1, start + depth + 1, dtype=torch.bool)
            hidden, past = head.run(token.view(1, 1), hidden, at, seen, past)


def test_accepted():
    """A chain 5, 6 with the sibling 7, which has the child 8."""
    pads = [-1] * (width.CANDIDATES - 2)
    low = [-9.0] * len(pads)
    levels = [
        width.Level(*(torch.tensor([row]) for row in rows))
        for rows in (
            ([5, 7, *pads], [-0.1, -0.5, *low], [-1] * width.CANDIDATES),
            ([6, 9, *pads, 8, 4, *pads], [-0.2, -3, *low, -0.6, -4, *low],
             [0] * width.CANDIDATES + [1] * width.CANDIDATES),
        )
    ]  # fmt: skip
    start = torch.tensor([0])
    for text, nodes, expected in [
        ([0, 5, 6], None, 2), ([0, 7, 8], None, 0), ([0, 7, 8], 4, 2),
        ([0, 7, 8], 3, 1), ([0, 5, 9], 4, 1), ([0, 3, 6], 9, 0),
    ]:  # fmt: skip
        found = width.accepted(levels, torch.tensor(text), start, nodes)
        assert found.tolist() == [expected]


def test_walks_go_on_after_what_was_accepted():
    assert list(width.walk([2, 0, 0, 1])) == [2, 1, 0, 0, 1, 0, 1, 1]
