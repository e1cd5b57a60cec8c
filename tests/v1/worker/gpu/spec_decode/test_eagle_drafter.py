# SPDX-License-Identifier: Apache-2.0
"""What an EAGLE head is fed of the target's hidden states."""

from types import SimpleNamespace

import pytest
import torch

from vllm.v1.worker.gpu.spec_decode.unified import eagle
from vllm.v1.worker.gpu.spec_decode.unified.eagle import EagleDrafter
from vllm.v1.worker.gpu.spec_decode.unified.layout import DraftLayout

LAST = torch.full((3, 4), 9.0)
AUX = [torch.full((3, 4), 1.0), torch.full((3, 4), 2.0)]


def drafter(method: str, **hf_config) -> EagleDrafter:
    """A drafter as far as feeding it needs one."""
    made = EagleDrafter.__new__(EagleDrafter)
    made.is_eagle3, made.target_mask = method == "eagle3", None
    made.layout = DraftLayout(7, token_shift=1)
    made.draft_model_config = SimpleNamespace(hf_config=SimpleNamespace(**hf_config))
    return made


@pytest.mark.parametrize(
    "eagle_config", [None, {}, {"use_aux_hidden_state": True}, {"layer_ids": [1, 2]}]
)
def test_eagle3_is_fed_the_aux_states(eagle_config: dict | None):
    hidden = drafter("eagle3", eagle_config=eagle_config).target_hidden(LAST, AUX)
    assert [rows is aux for rows, aux in zip(hidden.sources, AUX, strict=True)] == [
        True
    ] * 2
    assert hidden.fallback.shape == (8,)


def test_a_head_that_takes_no_aux_states_is_fed_the_last_ones():
    """The runner collects aux states for every head of method eagle3."""
    no_aux = drafter("eagle3", eagle_config={"use_aux_hidden_state": False})
    hidden = no_aux.target_hidden(LAST, AUX)
    assert len(hidden.sources) == 1 and hidden.sources[0] is LAST
    assert hidden.fallback.shape == (4,)


def test_eagle_is_fed_the_last_states():
    assert drafter("eagle").target_hidden(LAST, None).sources[0] is LAST


def test_masks_need_a_learned_hidden_state(monkeypatch):
    """A class of heads without one is refused, and says what to set."""
    module = torch.nn.Module()
    monkeypatch.setattr(eagle, "load_eagle_model", lambda *args: module)
    made = drafter("eagle3")
    made.layout = DraftLayout(7, token_shift=1, parallel_width=7)
    with pytest.raises(ValueError, match=r"^Module has no mask_hidden.*set parallel_"):
        made.load(torch.nn.Module(), None)
