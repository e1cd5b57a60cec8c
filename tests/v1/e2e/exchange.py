# SPDX-License-Identifier: Apache-2.0
"""Collectives for data-parallel ranks, with torch.distributed.

vLLM's CPU communicator has none of variable size, and that of a GPU requires NCCL
2.29.7. Workers import this module before they create communicators, because
`worker_extension_cls` names a class of it.
"""

from typing import Any

import torch
import torch.distributed as dist

from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
from vllm.distributed.device_communicators.cuda_communicator import CudaCommunicator


class Exchange:
    """Adds nothing to a worker; it only makes it import this module."""


def all_gatherv(group: Any, given: Any, dim: int = 0, sizes: Any = None) -> Any:
    """Rows of all ranks, whose numbers of rows may differ."""
    if isinstance(given, list):
        return [all_gatherv(group, one, dim, sizes) for one in given]
    sizes = sizes or [len(given)] * group.world_size
    padded = given.new_zeros(max(sizes), *given.shape[1:])
    padded[: len(given)] = given
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded, group=group.device_group)
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])


def reduce_scatterv(group: Any, given: Any, dim: int = 0, sizes: Any = None) -> Any:
    """This rank's rows of the sum over ranks."""
    total, rank = given.clone(), group.rank_in_group
    dist.all_reduce(total, group=group.device_group)
    sizes = sizes or [len(given) // group.world_size] * group.world_size
    begin = sum(sizes[:rank])
    return total[begin : begin + sizes[rank]]


def reduce_scatterv_into_output(
    group: Any, given: Any, output: Any, dim: int = 0, sizes: Any = None
) -> Any:
    return output.copy_(reduce_scatterv(group, given, dim, sizes))


Communicator = CudaCommunicator if torch.cuda.is_available() else CpuCommunicator
for exchange in (all_gatherv, reduce_scatterv, reduce_scatterv_into_output):
    setattr(Communicator, exchange.__name__, exchange)
