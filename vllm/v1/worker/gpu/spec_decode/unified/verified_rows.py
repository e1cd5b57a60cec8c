# SPDX-License-Identifier: Apache-2.0
"""Leaves the rows of rejected drafts out of a draft pass, on a CPU.

A GPU learns which drafts were rejected after the host has launched the pass, so there
these rows are padding. On a CPU the host knows, nothing is captured, and the time of a
pass is proportional to its rows.
"""

import numpy as np
import torch

from .backlog import DraftInput, first_rows
from .drafter import Drafter

# Gathering rows takes as long as about so many rows of a small drafter.
MIN_REJECTED = 8


def knows_rejected(drafter: Drafter, device: torch.device) -> bool:
    """Whether rows can be left out: those of M-RoPE and of images stay in place."""
    has_more = drafter.takes_embeddings or drafter.rope_dims
    return device.type == "cpu" and not has_more


def without_rejected(given: DraftInput) -> DraftInput:
    """Returns the step without rejected rows, if there are enough to gain by it."""
    batch, verified = given.step.batch, given.verified
    n = batch.num_reqs
    rejected = verified.num_rejected[:n].numpy()
    if rejected.sum() < MIN_REJECTED:
        return given
    starts = verified.query_start_loc[: n + 1].numpy()
    counts = np.diff(starts) - rejected
    index = torch.from_numpy(first_rows(starts[:-1], counts))
    columns = [rows.index_select(0, index) for rows in given.columns()]
    ends = batch.seq_lens_cpu_upper_bound[:n].numpy() - rejected
    states = batch.idx_mapping_np[:n]
    sampled = verified.num_sampled[:n]
    return given.of_requests(columns, states, counts, ends, sampled)
