# SPDX-License-Identifier: Apache-2.0
"""Draft models that each rank has all of, while ranks split the target.

With pipeline parallelism the last stage drafts, and has the whole draft model: vLLM
would split it like the target.

Tensor-parallel ranks split a draft model, or each has all of it if the user asks for
that (`draft_tensor_parallel_size: 1`). Then they compute the same drafts from the same
tokens, as they do with everything that vLLM does not split: expert routers, and
sampling. A draft pass then waits for no other rank; with a small model, waiting takes
most of the time.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from functools import partial

from vllm.config import VllmConfig
from vllm.distributed import parallel_state

TENSOR, PIPELINE = "_TP", "_PP"  # vLLM's groups of ranks


def draft_ranks(vllm_config: VllmConfig) -> Callable[[], AbstractContextManager]:
    """The context to build and run a draft model in: `with draft_ranks(c)(): …`."""
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
    """Within it, models are built and run as if this were the only rank of `groups`."""
    shared = {name: getattr(parallel_state, name) for name in groups}
    for name, group in shared.items():
        setattr(parallel_state, name, _alone(group))
    try:
        yield
    finally:
        for name, group in shared.items():
            setattr(parallel_state, name, group)


def _alone(group: parallel_state.GroupCoordinator) -> parallel_state.GroupCoordinator:
    """A group of one rank, within which vLLM communicates nothing."""
    alone = copy(group)
    alone.ranks, alone.world_size, alone.rank_in_group = [group.rank], 1, 0
    alone.device_communicator = alone.mq_broadcaster = None
    return alone
