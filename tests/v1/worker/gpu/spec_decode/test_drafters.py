# SPDX-License-Identifier: Apache-2.0
"""Which speculator and drafter serve a config, and what a drafter is fed."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from vllm.config.compilation import CUDAGraphMode
from vllm.config.drafter import DrafterConfig, TargetFeatures
from vllm.v1.worker.gpu.spec_decode.unified import drafters
from vllm.v1.worker.gpu.spec_decode.unified.drafters import eagle
from vllm.v1.worker.gpu.spec_decode.unified.drafters.eagle import EagleDrafter
from vllm.v1.worker.gpu.spec_decode.unified.inputs import (
    DraftInputs,
    rows_of_embeddings,
)
from vllm.v1.worker.gpu.spec_decode.unified.layout import DraftLayout
from vllm.v1.worker.gpu.spec_decode.unified.tree.step import TreeStep
from vllm.v1.worker.gpu.spec_decode.unified.tree.trees import DraftTrees

CPU, WIDTH = torch.device("cpu"), 4
LAST = torch.full((3, WIDTH), 9.0)
AUX = [torch.full((3, WIDTH), 1.0), torch.full((3, WIDTH), 2.0)]
EAGLE, P_EAGLE = DraftLayout(4, 1), DraftLayout(4, 1, 4)


def engine_config(
    method: str = "eagle3",
    drafter: DrafterConfig | None = None,
    sampling: str = "greedy",
    vocab_size: int = 16,
    **hf_config,
) -> SimpleNamespace:
    """The config attributes that drafters read."""
    draft = SimpleNamespace(
        hf_config=SimpleNamespace(**hf_config),
        get_vocab_size=lambda: vocab_size,
        get_hidden_size=lambda: WIDTH,
    )
    spec = SimpleNamespace(
        method=method,
        model="some/drafter",
        draft_model_config=draft,
        draft_sample_method=sampling,
        drafter=drafter or DrafterConfig(method, 7, is_unified=True),
        use_gemma4_mtp=lambda: False,
        use_multi_module_mtp=lambda: False,
        use_eagle=lambda: True,
    )
    target = SimpleNamespace(
        dtype=torch.float32, uses_mrope=False, supports_multimodal_inputs=False
    )
    return SimpleNamespace(speculative_config=spec, model_config=target)


@pytest.mark.parametrize("layers, is_fed", [((6, 2), False), ((6,), True)])
def test_target_without_aux_hidden_states(
    layers: tuple[int, ...], is_fed: bool, monkeypatch, caplog_vllm
):
    """A PARD-2 drafter can only use its last hidden states."""
    monkeypatch.setattr(drafters, "get_model_cls", lambda config: torch.nn.Linear)
    features = TargetFeatures(layers, 6, 1.0)
    drafter = DrafterConfig("draft_model", 1, target_features=features)
    assert drafters._uses_target_features(engine_config(drafter=drafter)) is is_fed
    assert ("Linear does not return" in caplog_vllm.text) is not is_fed


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
    made = EagleDrafter(engine_config(method, eagle_config=eagle_config), CPU)
    hidden = made.target_hidden(LAST, AUX if method == "eagle3" else None)
    assert [id(rows) for rows in hidden.sources] == [id(rows) for rows in sources]
    assert hidden.fallback.shape == (WIDTH * len(sources),)


def test_masks_need_a_learned_hidden_state(monkeypatch):
    """A head without one is refused; the error says what to set."""
    monkeypatch.setattr(eagle, "load_eagle_model", lambda *_: torch.nn.Module())
    drafter = DrafterConfig("eagle3", 7, parallel_width=7)
    config = engine_config(drafter=drafter)
    with pytest.raises(ValueError, match=r"^Module has no mask_hidden.*set parallel_"):
        EagleDrafter(config, CPU).load(torch.nn.Module(), config)


# Images: a head is fed the target's embeddings, in rows of the draft batch.


def batch(*query_lens: int) -> SimpleNamespace:
    starts = np.cumsum([0, *query_lens], dtype=np.int32)
    return SimpleNamespace(num_reqs=len(query_lens), query_start_loc_np=starts)


@pytest.mark.parametrize(
    "layout, step, drafted, marked, expected",
    [
        (EAGLE, [5, 4, 6], [5, 4, 6], [0, 1, 8, 9, 14], [0, 1, 8, 9, 14]),
        # After the masks of preceding requests.
        (P_EAGLE, [5, 4, 6], [5, 4, 6], [0, 1, 8, 9, 14], [0, 1, 11, 15, 20]),
        # Five rows of each tree of nine nodes are kept for the drafter.
        (P_EAGLE, [10, 10, 6], [5, 5, 6], [20, 25], [16, 21]),
    ],
)
def test_rows_of_embeddings(layout: DraftLayout, step, drafted, marked, expected):
    is_multimodal = torch.zeros(sum(step), dtype=torch.bool)
    is_multimodal[marked] = True
    embeds, batches = [torch.ones(len(marked), 8)], (batch(*step), batch(*drafted))
    given, rows = rows_of_embeddings((embeds, is_multimodal), *batches, layout)
    assert given is embeds and rows.tolist() == expected
    for nothing in (None, ([], is_multimodal)):
        assert rows_of_embeddings(nothing, *batches, layout) is None


class Head(torch.nn.Module):
    """A head that embeds a token as its id."""

    def embed_input_ids(self, ids, multimodal_embeddings=None, is_multimodal=None):
        embeds = ids[:, None].float().repeat(1, 2)
        if multimodal_embeddings is not None:
            embeds[is_multimodal] = torch.cat(multimodal_embeddings)
        return embeds


@pytest.mark.parametrize("mode", [CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE])
def test_head_is_fed_multimodal_and_own_embeddings(mode: CUDAGraphMode):
    """Later passes have only the head's own; a piecewise graph reads one address."""
    drafter = EagleDrafter(engine_config("eagle"), CPU)
    drafter.model, drafter.takes_embeddings = Head(), True
    buffers = DraftInputs(EAGLE, 6, 2, CPU, 2, torch.float32, rope_dims=3)
    buffers.fed_rows(torch.zeros(2))
    buffers.batch.input_ids[:4] = torch.tensor([1, 2, 3, 4])
    buffers.multimodal = [torch.full((1, 2), 9.0)], torch.tensor([2])

    def embeds(is_first: bool) -> torch.Tensor:
        inputs = drafter.model_inputs(buffers, 4 if is_first else 2, is_first, mode)
        assert inputs["positions"].shape == (3, len(inputs["inputs_embeds"]))
        return inputs["inputs_embeds"]

    first = embeds(is_first=True)
    assert first[:, 0].tolist() == [1, 2, 9, 4]
    assert embeds(is_first=False)[:, 0].tolist() == [1, 2]
    buffers.multimodal = None
    again = embeds(is_first=True)
    assert again[:, 0].tolist() == [1, 2, 3, 4]
    is_piecewise = mode == CUDAGraphMode.PIECEWISE
    assert (again.data_ptr() == first.data_ptr()) == is_piecewise


def test_rows_of_same_depth_share_mrope_positions():
    """Without trees positions follow row numbers; dummy batches are not changed."""
    step = TreeStep(DraftTrees.chains(1, 2, 3, CPU), 4)
    step.has_trees, step._moved_by = True, torch.tensor([0, 0, -1, -1])
    by_number = torch.tensor([[7, 8, 9, 10]] * 3)
    positions = by_number.clone()
    step.move_rope(positions, SimpleNamespace(num_draft_tokens_per_req=None))
    assert torch.equal(positions, by_number)
    step.move_rope(positions, SimpleNamespace(num_draft_tokens_per_req=[3]))
    assert positions.tolist() == [[7, 8, 8, 9]] * 3
