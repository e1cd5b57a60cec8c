# SPDX-License-Identifier: Apache-2.0
"""PARD against PARD-2 on equal text: how it is counted, and what it found."""

import pytest
import torch
from transformers import LlamaForCausalLM

from benchmarks.spec_decode.draft_probabilities.mean import gain_error
from benchmarks.spec_decode.fed_gain import DRAFTERS, Drafter, hits_of, replay
from benchmarks.spec_decode.results import RESULTS, load
from benchmarks.spec_decode.shapes import BUNDLED

K = 4


def test_steps_follow_what_they_accept():
    """A step begins behind the token that the step before it was corrected by."""
    hits = [[True, True], [False, True], [True, False], [True, False], [True, True]]
    hits += [[False, False]] * 3
    assert replay(hits, 2) == [2, 1, 0]


def test_a_hit_is_the_text_itself():
    ids = torch.tensor([5, 6, 7, 8])
    drafted = torch.tensor([[7, 8], [8, 9], [8, 9]])
    wanted = [[True, True], [True, False], [False, False]]
    assert hits_of(drafted, ids, 1).tolist() == wanted


@pytest.mark.parametrize("name", DRAFTERS)
def test_drafts_are_those_of_one_context(name: str):
    """All at once, and a pass for each text with its masks behind it."""
    drafter = Drafter(BUNDLED / DRAFTERS[name], is_fed=name == "pard2")
    target = LlamaForCausalLM.from_pretrained(BUNDLED / "target", dtype=torch.float32)
    ids = torch.randint(3, 2000, (12,), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        states = target(ids[None], output_hidden_states=True).hidden_states
        states = [layer[0] for layer in states]
        found = drafter.drafts(ids, states, first=8, k=K)
        for row, newest in enumerate(range(8, len(ids))):
            text = torch.cat([ids[: newest + 1], torch.full((K - 1,), 2)])
            embeds = drafter.model.get_input_embeddings()(text)
            if drafter.projection is not None:
                fed = drafter.fed(states)[: newest + 1]
                embeds = embeds + torch.cat([fed, fed[-1:].expand(K - 1, -1)])
            logits = drafter.model(inputs_embeds=embeds[None]).logits[0, newest:]
            assert found[row].tolist() == logits.argmax(-1).tolist()


def test_pard2_accepts_more_than_pard():
    """Recorded on hundreds of held-out prompts, by more than chance; without the
    target's states, of which the documentation says the same, too."""
    found = load(RESULTS / "cpu" / "fed-gain.json")["measurements"]
    pard = found["pard/K7"]
    assert pard["requests"] >= 400
    for name in ("pard2", "pard2-unfed"):
        point = found[f"{name}/K7"]
        gain = point["acceptance_length"] - pard["acceptance_length"]
        assert gain > 2 * gain_error(pard["counts"], point["counts"]), name
