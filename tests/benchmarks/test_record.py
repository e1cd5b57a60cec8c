# SPDX-License-Identifier: Apache-2.0
"""Recorded drafts are those of the drafters, position by position."""

import pytest
import torch

from benchmarks.spec_decode.traces import NO_RANK
from tests.v1.e2e.oracle import HeadOracle, ModelOracle, read_config
from tools.tiny_models import drafting
from tools.tiny_models.record import LOOP, ranks_of, until_loop

DEPTH = 5


@pytest.mark.parametrize("name", drafting.DRAFTERS)
@torch.inference_mode()
def test_drafts_behind_every_position_are_those_of_one(models, held_out_tokens, name):
    target = drafting.load_llama(models / "target")
    drafter = drafting.load(name, models, target)
    ids = torch.tensor(held_out_tokens[100:140])
    states = target(ids[None], output_hidden_states=True).hidden_states
    positions = range(20, 30)
    states = [layer[0] for layer in states]
    probs, tokens = drafting.draft(drafter, ids, states, positions, DEPTH, 3)
    assert (probs.diff(dim=-1) <= 0).all() and (probs.sum(-1) <= 1).all()
    width = DEPTH if drafter.is_parallel else 1
    if drafter.shift:
        layers = read_config(models / name)["eagle_aux_hidden_state_layer_ids"]
        oracle = HeadOracle(models / name, target, tuple(layers))
    else:
        read_mask = read_config(models / "pard")["pard_token"]
        oracle = _model_oracle(models / name, read_mask)
    for row, newest in enumerate(positions):
        known = ids[: newest + 1].tolist()
        assert tokens[row, :, 0].tolist() == oracle.drafts(known, DEPTH, width)


def _model_oracle(folder, mask: int) -> ModelOracle:
    """One of a plain draft model too, which has no mask and needs none."""
    oracle = object.__new__(ModelOracle)
    oracle.model, oracle.mask = drafting.load_llama(folder), mask
    return oracle


def test_ranks_are_of_the_tokens_that_were_written():
    tokens = torch.tensor([[[5, 6], [7, 8], [9, 1]]])
    for wanted, parallel, one_by_one in (
        ([5, 7, 9], [0, 0, 0], [0, 0, 0]),
        ([6, 7, 2], [1, 0, NO_RANK], [1, NO_RANK, NO_RANK]),
        ([5, 8, 9], [0, 1, 0], [0, 1, NO_RANK]),
    ):
        asked = tokens, torch.tensor([wanted])
        assert ranks_of(*asked, is_parallel=True).tolist() == [parallel]
        found = ranks_of(*asked, is_parallel=False)[0].tolist()
        assert [r == 0 for r in found] == [r == 0 for r in one_by_one]


def test_a_text_ends_where_it_repeats_itself():
    once = list(range(30))
    assert until_loop(once) == 30
    looping = [*once, *once[5 : 5 + LOOP], 99]
    assert until_loop(looping) == 30 + LOOP - 1
