# SPDX-License-Identifier: Apache-2.0
"""The rows of multimodal embeddings (image, audio, video) in a draft batch."""

import numpy as np
import torch

from vllm.v1.worker.gpu.input_batch import InputBatch

from .layout import DraftLayout


def rows_of_embeddings(
    mm_inputs: tuple[list[torch.Tensor], torch.Tensor] | None,
    batch: InputBatch,
    drafted: InputBatch,
    layout: DraftLayout,
) -> tuple[list[torch.Tensor], torch.Tensor] | None:
    """The target's embeddings that a head takes, and the rows that take them.

    vLLM has shifted `mm_inputs` by one token, as in a head's batch: a row of the step
    is marked if the token after its own is multimodal.

    Args:
        mm_inputs: embeddings, each [any, H], and [num_tokens] bool on the CPU, True for
            the rows that they are for, in order; None for heads that take tokens only.
        batch: the target's step.
        drafted: the same, with trees reduced to their accepted paths.
        layout: of the draft batch.

    Returns:
        The embeddings, and [rows] int64 on the CPU, rows of the draft batch; None if
        the step has none.
    """
    if mm_inputs is None or not mm_inputs[0]:
        return None
    embeds, is_multimodal = mm_inputs
    # In a trimmed batch the host knows where prompts begin: after all drafts.
    n = batch.num_reqs
    starts = batch.query_start_loc_np[: n + 1]
    first = drafted.query_start_loc_np[:n] + np.arange(n) * layout.num_extra_slots
    moved_by = np.repeat(first - starts[:n], np.diff(starts))
    rows = np.flatnonzero(is_multimodal.numpy())
    return embeds, torch.from_numpy(rows + moved_by[rows])
