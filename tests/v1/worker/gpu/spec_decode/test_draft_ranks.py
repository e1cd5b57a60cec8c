# SPDX-License-Identifier: Apache-2.0
"""Which process groups a draft model is built and run in."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm.distributed import (
    get_pp_group,
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    parallel_state,
    tensor_model_parallel_all_gather,
)
from vllm.v1.worker.gpu.spec_decode.unified.config import draft_ranks


@pytest.fixture(autouse=True)
def groups(monkeypatch) -> None:
    """The second of two tensor-parallel ranks, in the last of two pipeline stages."""
    for name, ranks in {"_TP": [2, 3], "_PP": [1, 3]}.items():
        group = object.__new__(parallel_state.GroupCoordinator)
        group.rank, group.ranks, group.world_size, group.rank_in_group = 3, ranks, 2, 1
        monkeypatch.setattr(parallel_state, name, group)


def ranks_of(tensor: int, pipeline: int, own: int) -> Any:
    """`draft_ranks` with the target's group sizes and the drafter's tensor-parallel
    size."""
    sizes = [
        SimpleNamespace(tensor_parallel_size=one, pipeline_parallel_size=other)
        for one, other in ((tensor, pipeline), (own, 1))
    ]
    spec = SimpleNamespace(draft_parallel_config=sizes[1])
    config = SimpleNamespace(parallel_config=sizes[0], speculative_config=spec)
    return draft_ranks(config)()


@pytest.mark.parametrize(
    "sizes, ranks, stages",
    [
        ((2, 2, 1), 1, 1),
        ((2, 2, 2), 2, 1),
        ((2, 1, 1), 1, 2),  # with one stage its group is kept
        ((1, 1, 1), 2, 2),
    ],
)
def test_groups(sizes: tuple[int, int, int], ranks: int, stages: int):
    logits = torch.ones(2, 3)
    with pytest.raises(ZeroDivisionError), ranks_of(*sizes):
        assert get_tensor_model_parallel_world_size() == ranks
        assert get_tensor_model_parallel_rank() == ranks - 1
        assert get_pp_group().world_size == stages
        assert get_pp_group().is_first_rank is (stages == 1)
        assert get_pp_group().is_last_rank
        if ranks == 1:  # nothing is communicated
            assert tensor_model_parallel_all_gather(logits) is logits
        raise ZeroDivisionError
    # The groups are restored, after errors too.
    assert get_tensor_model_parallel_world_size() == get_pp_group().world_size == 2
