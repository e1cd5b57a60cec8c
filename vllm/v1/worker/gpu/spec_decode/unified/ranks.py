# SPDX-License-Identifier: Apache-2.0
"""A draft model that a rank has all of, where ranks share their target.

Of pipeline stages the last one drafts, and has the whole draft model: vLLM would cut it
as it cuts the target.

Tensor-parallel ranks share a draft model, or each has the whole of it if the user asks
for that (`draft_tensor_parallel_size: 1`). Then they make the same drafts of the same
tokens, as they do with all that vLLM does not split: routers of experts, and sampling.
A draft pass waits for no other rank, which is most of the time of a small model's.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from functools import partial

from vllm.config import VllmConfig
from vllm.distributed import parallel_state

TENSOR, PIPELINE = "_TP", "_PP"  # vLLM's groups of ranks


def draft_ranks(vllm_config: VllmConfig) -> Callable[[], AbstractContextManager]:
    """In what a draft model is to be built and run: `with draft_ranks(config)(): …`."""
    target = vllm_config.parallel_config
    own = vllm_config.speculative_config.draft_parallel_config
    sizes = {
        TENSOR: (own.tensor_parallel_size, target.tensor_parallel_size),
        PIPELINE: (own.pipeline_parallel_size, target.pipeline_parallel_size),
    }
    alone = [group for group, (size, shared) in sizes.items() if size == 1 < shared]
    return partial(as_only_rank, alone) if alone else nullcontext


@contextmanager
def as_only_rank(groups: list[str]) -> Iterator[None]:
    """What is built or run in it takes this rank for the only one of these groups."""
    shared = {name: getattr(parallel_state, name) for name in groups}
    for name, group in shared.items():
        setattr(parallel_state, name, _alone(group))
    try:
        yield
    finally:
        for name, group in shared.items():
            setattr(parallel_state, name, group)


def _alone(group: parallel_state.GroupCoordinator) -> parallel_state.GroupCoordinator:
    """Of one rank, as which vLLM's groups exchange nothing."""
    alone = copy(group)
    alone.ranks, alone.world_size, alone.rank_in_group = [group.rank], 1, 0
    alone.device_communicator = alone.mq_broadcaster = None
    return alone
