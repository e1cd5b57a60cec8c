# SPDX-License-Identifier: Apache-2.0
"""The causal convolution of Mamba layers over tokens that may be rejected, on a CPU.

States are laid out as by the Triton kernel of `causal_conv1d_update`: a request's last
columns before a step's tokens, followed by those tokens, so that the next step can
begin after the last accepted one.
"""

import torch
import torch.nn.functional as F


def update_with_drafts(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    state_indices: torch.Tensor,
    query_start_loc: torch.Tensor,
    num_accepted: torch.Tensor,
    null_block: int,
) -> torch.Tensor:
    """Convolves a step's tokens, and updates the states.

    Args:
        x: [num_tokens, D] tokens of all requests.
        conv_state: [blocks, D, L], L at least width - 2 plus the most tokens of a
            request; updated in place.
        weight: [D, width].
        bias: [D].
        activation: "silu", "swish" or None.
        state_indices: [n] or [n, blocks] int32, whose first block holds the state.
        query_start_loc: [n + 1] int32.
        num_accepted: [n] int32, of each request's last step, bonus token included.
        null_block: the block of rows without a state.

    Returns:
        [num_tokens, D].
    """
    dim, width = weight.shape
    slots = state_indices.reshape(len(state_indices), -1)[:, 0].tolist()
    rows = zip(slots, num_accepted.tolist(), strict=False)  # the latter may be padded
    bounds, out = query_start_loc.tolist(), torch.zeros_like(x)
    for row, (slot, accepted) in enumerate(rows):
        begin, end = bounds[row : row + 2]
        if begin == end or slot == null_block:
            continue
        before = conv_state[slot, :, accepted - 1 : accepted + width - 2]
        columns = torch.cat([before, x[begin:end].T.to(before.dtype)], dim=1)
        made = F.conv1d(
            columns[None].to(weight.dtype), weight[:, None], bias, groups=dim
        )
        out[begin:end] = made[0].T
        conv_state[slot, :, : columns.shape[1] - 1] = columns[:, 1:]
    return F.silu(out) if activation in ("silu", "swish") else out
