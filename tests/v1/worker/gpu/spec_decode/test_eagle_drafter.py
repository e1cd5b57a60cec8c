# SPDX-License-Identifier: Apache-2.0
"""Which of the target's hidden states an EAGLE head is fed."""

from types import SimpleNamespace

import pytest
import torch

from vllm.v1.worker.gpu.spec_decode.unified.drafters import eagle
from vllm.v1.worker.gpu.spec_decode.unified.drafters.eagle import EagleDrafter
from vllm.v1.worker.gpu.spec_decode.unified.layout import DraftLayout

LAST = torch.full((3, 4), 9.0)
AUX = [torch.full((3, 4), 1.0), torch.full((3, 4), 2.0)]


def drafter(method: str, **hf_config) -> EagleDrafter:
    """A drafter with only what feeding it needs."""
    made = EagleDrafter.__new__(EagleDrafter)
    made.is_eagle3, made.target_mask = method == "eagle3", None
    made.layout = DraftLayout(7, token_shift=1)
    made.draft_model_config = SimpleNamespace(hf_config=SimpleNamespace(**hf_config))
    return made


@pytest.mark.parametrize(
    "method, eagle_config, sources",
    [
        ("eagle3", None, AUX),
        ("eagle3", {}, AUX),
        ("eagle3", {"use_aux_hidden_state": True}, AUX),
        ("eagle3", {"layer_ids": [1, 2]}, AUX),
        # The runner collects aux states for every head of method eagle3.
        ("eagle3", {"use_aux_hidden_state": False}, [LAST]),
        ("eagle", None, [LAST]),
    ],
)
def test_heads_are_fed_aux_or_last_hidden_states(method, eagle_config, sources):
    made = drafter(method, eagle_config=eagle_config)
    hidden = made.target_hidden(LAST, AUX if method == "eagle3" else None)
    assert [id(rows) for rows in hidden.sources] == [id(rows) for rows in sources]
    assert hidden.fallback.shape == (4 * len(sources),)


def test_masks_need_a_learned_hidden_state(monkeypatch):
    """A head without one is refused; the error says what to set."""
    module = torch.nn.Module()
    monkeypatch.setattr(eagle, "load_eagle_model", lambda *args: module)
    made = drafter("eagle3")
    made.layout = DraftLayout(7, token_shift=1, parallel_width=7)
    with pytest.raises(ValueError, match=r"^Module has no mask_hidden.*set parallel_"):
        made.load(torch.nn.Module(), None)
