# SPDX-License-Identifier: Apache-2.0
"""The verified batch: everything of a target's step that its drafter receives."""

from typing import NamedTuple

import torch

from vllm.v1.worker.gpu.input_batch import InputBatch


class RequestStates(NamedTuple):
    """What the model runner keeps of each request, by request state (R of them)."""

    last_sampled: torch.Tensor  # [R] or [R, 1] int64
    next_prefill_tokens: torch.Tensor  # [R] int32
    temperature: torch.Tensor  # [R] float32
    seeds: torch.Tensor  # [R] int64
    # [R] int32, M-RoPE minus plain positions, past the prompt; None if the drafter
    # takes plain positions.
    rope_deltas: torch.Tensor | None = None


class TargetStep(NamedTuple):
    """A step of the target, of n requests and T rows, after verification.

    With draft trees, `accept` reduces it to the rows of accepted paths.

    Attributes:
        batch: the target's batch.
        num_sampled: [n] int32, accepted drafts and the next token; 0 while a prompt is
            being chunked.
        num_rejected: [n] int32, rows at each request's end that were not accepted.
        requests: by request state.
        slot_mappings: [G, at least T] int64, KV slots by KV group.
        last_hidden: [at least T, H], the target's output.
        aux_hidden: [at least T, H] each, of the target's auxiliary layers.
        rope_positions: [D, at least T] int64, M-RoPE positions; None if the drafter
            takes plain positions.
        is_dummy: whether its requests have no state and no KV.
    """

    batch: InputBatch
    num_sampled: torch.Tensor
    num_rejected: torch.Tensor
    requests: RequestStates
    slot_mappings: torch.Tensor
    last_hidden: torch.Tensor
    aux_hidden: list[torch.Tensor] | None
    rope_positions: torch.Tensor | None = None
    is_dummy: bool = False
