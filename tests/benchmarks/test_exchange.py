# SPDX-License-Identifier: Apache-2.0
"""The exchange that stands in where vLLM's communicators have none."""

from functools import partial
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

SIZES = [1, 3]


def rank_of_two(rank: int, store: str) -> None:
    from benchmarks.spec_decode import exchange

    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=2)
    group = SimpleNamespace(
        device_group=dist.group.WORLD, rank_in_group=rank, world_size=2
    )
    own = torch.full((SIZES[rank], 2), rank + 1.0)
    for sizes, rows in ((SIZES, own), (None, own[:1])):
        first, second = exchange.all_gatherv(group, [rows, 10 * rows], sizes=sizes)
        wanted = [1.0] + [2.0] * (3 if sizes else 1)
        assert first[:, 0].tolist() == wanted and torch.equal(second, 10 * first)
        back = exchange.reduce_scatterv(group, first, sizes=sizes)
        assert torch.equal(back, 2 * rows)
        out = torch.empty_like(rows)
        into = exchange.reduce_scatterv_into_output
        assert into(group, first, out, sizes=sizes) is out and torch.equal(out, back)
    dist.destroy_process_group()


def test_two_ranks(tmp_path):
    mp.spawn(partial(rank_of_two, store=str(tmp_path / "store")), nprocs=2)


def test_only_who_lacks_it_is_lent_it():
    from benchmarks.spec_decode import exchange

    class Communicator:
        device_group, rank_in_group, world_size = None, 0, 1

        def all_gatherv(self, given, dim=0, sizes=None):
            return "own"

        reduce_scatterv = reduce_scatterv_into_output = all_gatherv

    exchange.lend(Communicator, lambda group: False)
    assert Communicator().all_gatherv(torch.ones(1)) == "own"
