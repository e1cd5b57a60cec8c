# SPDX-License-Identifier: Apache-2.0
"""For images a head is fed the target's embeddings, in rows of the draft batch."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.spec_decode.unified.drafters.eagle import (
    EagleDrafter,
    rows_of_embeddings,
)
from vllm.v1.worker.gpu.spec_decode.unified.inputs import DraftInputs
from vllm.v1.worker.gpu.spec_decode.unified.layout import DraftLayout
from vllm.v1.worker.gpu.spec_decode.unified.step import TargetStep
from vllm.v1.worker.gpu.spec_decode.unified.tree.accept import at_rows
from vllm.v1.worker.gpu.spec_decode.unified.tree.step import TreeStep

CPU = torch.device("cpu")
EAGLE, P_EAGLE = DraftLayout(4, 1), DraftLayout(4, 1, 4)


def batch(*query_lens: int) -> SimpleNamespace:
    return SimpleNamespace(
        num_reqs=len(query_lens),
        query_start_loc_np=np.cumsum([0, *query_lens], dtype=np.int32),
    )


def found_rows(layout: DraftLayout, step, drafted, *marked: int) -> list[int]:
    is_multimodal = torch.zeros(step.query_start_loc_np[-1], dtype=torch.bool)
    is_multimodal[list(marked)] = True
    embeds = [torch.ones(len(marked), 8)]
    given, rows = rows_of_embeddings((embeds, is_multimodal), step, drafted, layout)
    assert given is embeds
    return rows.tolist()


def test_rows_without_masks_are_those_of_the_step():
    step = batch(5, 4, 6)
    assert found_rows(EAGLE, step, step, 0, 1, 8, 9, 14) == [0, 1, 8, 9, 14]


def test_rows_move_by_masks_of_preceding_requests():
    step = batch(5, 4, 6)
    assert found_rows(P_EAGLE, step, step, 0, 1, 8, 9, 14) == [0, 1, 11, 15, 20]


def test_rows_move_as_preceding_trees_shrink():
    """The step has trees of 9 nodes; five rows of each are kept for the drafter."""
    step, drafted = batch(10, 10, 6), batch(5, 5, 6)
    assert found_rows(P_EAGLE, step, drafted, 20, 25) == [16, 21]


def test_text_steps_have_no_embeddings():
    nothing = [], torch.zeros(3, dtype=torch.bool)
    assert rows_of_embeddings(nothing, batch(3), batch(3), EAGLE) is None
    assert rows_of_embeddings(None, batch(3), batch(3), EAGLE) is None


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
    drafter = EagleDrafter.__new__(EagleDrafter)
    drafter.model, drafter.takes_embeddings = Head(), True
    drafter.is_eagle3 = False
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
    step = TreeStep.__new__(TreeStep)
    step.has_trees, step._moved_by = True, torch.tensor([0, 0, -1, -1])
    by_number = torch.tensor([[7, 8, 9, 10]] * 3)
    positions = by_number.clone()
    step.move_rope(positions, SimpleNamespace(num_draft_tokens_per_req=None))
    assert torch.equal(positions, by_number)
    step.move_rope(positions, SimpleNamespace(num_draft_tokens_per_req=[3]))
    assert positions.tolist() == [[7, 8, 8, 9]] * 3


def test_accepted_rows_keep_their_mrope_positions():
    states = torch.arange(4.0)[:, None]
    positions = torch.arange(4).repeat(3, 1)
    step = TargetStep(None, None, None, None, None, states, None, positions)
    kept = at_rows(step, torch.tensor([0, 2]))
    assert kept.rope_positions.tolist() == [[0, 2]] * 3
