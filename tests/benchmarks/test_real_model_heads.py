# SPDX-License-Identifier: Apache-2.0
"""Heads travel without what is the target's; shared passages are found."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from tools.real_model import heads, questions


@pytest.mark.parametrize("reduced", [True, False])
def test_slim_and_fill(tmp_path, reduced):
    target, head, slim, filled = (tmp_path / name for name in "thsf")
    for folder in (target, head):
        folder.mkdir()
    table = torch.randn(6, 4).bfloat16()
    save_file({"model.embed_tokens.weight": table}, target / "model.safetensors")
    kept = torch.tensor([True, False, True, True, False, False])
    tensors = {"fc.weight": torch.randn(4, 12), heads.EMBED: table.clone()}
    tensors[heads.LM_HEAD] = table[kept] if reduced else table + 1
    if reduced:
        tensors["t2d"] = kept
    save_file(tensors, head / "model.safetensors")
    config = {"speculators_config": {"verifier": {"name_or_path": "/elsewhere"}}}
    (head / "config.json").write_text(json.dumps(config))

    heads.slim(head, target, slim)
    left = load_file(slim / "model.safetensors")
    assert (heads.LM_HEAD in left) is not reduced and heads.EMBED not in left
    heads.fill(slim, target, filled)
    found = load_file(filled / "model.safetensors")
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)
    verifier = json.loads((filled / "config.json").read_text())["speculators_config"]
    assert verifier["verifier"]["name_or_path"] == str(target)


@pytest.mark.parametrize("length, shares", [(13, True), (12, False)])
def test_shared_passage(length, shares):
    held_out = questions.HeldOut([range(5), range(100, 200)])
    assert held_out.shares([7, 8, *range(150, 150 + length), 9]) is shares
