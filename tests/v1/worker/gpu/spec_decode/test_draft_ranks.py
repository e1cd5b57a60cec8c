# SPDX-License-Identifier: Apache-2.0
"""Which process groups a draft model is built and run in."""

from types import SimpleNamespace

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


def engine(tensor: int, pipeline: int, own: int) -> SimpleNamespace:
    """A config with the target's group sizes and the drafter's tensor-parallel size."""

    def sizes(tensor: int, pipeline: int) -> SimpleNamespace:
        return SimpleNamespace(
            tensor_parallel_size=tensor, pipeline_parallel_size=pipeline
        )

    spec = SimpleNamespace(draft_parallel_config=sizes(own, 1))
    return SimpleNamespace(
        parallel_config=sizes(tensor, pipeline), speculative_config=spec
    )


@pytest.mark.parametrize(
    "config, ranks, stages",
    [
        (engine(2, 2, own=1), 1, 1),
        (engine(2, 2, own=2), 2, 1),
        (engine(2, 1, own=1), 1, 2),  # with one stage its group is kept
        (engine(1, 1, own=1), 2, 2),
    ],
)
def test_groups(config: SimpleNamespace, ranks: int, stages: int):
    with draft_ranks(config)():
        assert get_tensor_model_parallel_world_size() == ranks
        assert get_tensor_model_parallel_rank() == ranks - 1
        assert get_pp_group().world_size == stages
        assert get_pp_group().is_first_rank is (stages == 1)
        assert get_pp_group().is_last_rank


def test_no_communication_with_one_rank():
    logits = torch.ones(2, 3)
    with draft_ranks(engine(2, 1, own=1))():
        assert tensor_model_parallel_all_gather(logits) is logits


def test_groups_are_restored_after_errors():
    with pytest.raises(ZeroDivisionError), draft_ranks(engine(2, 2, own=1))():
        raise ZeroDivisionError
    assert get_tensor_model_parallel_world_size() == get_pp_group().world_size == 2
