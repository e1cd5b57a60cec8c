# SPDX-License-Identifier: Apache-2.0
"""Data-parallel ranks agree on what the rank with the most requests would draft."""

import multiprocessing
from types import SimpleNamespace

import torch.distributed as dist

from vllm.utils.network_utils import get_open_port
from vllm.v1.engine.agreed_drafts import (
    agree_on_drafts,
    draft_as_agreed,
    set_idle_drafts,
)

from .test_draft_policy import RANKS_AGREE_EVERY, choose, make_policy


def make_engine(group=None) -> SimpleNamespace:
    calls = []
    executor = SimpleNamespace(collective_rpc=lambda *args, **more: calls.append(more))
    step_drafts = SimpleNamespace(policy=make_policy(ranks=2))
    return SimpleNamespace(
        scheduler=SimpleNamespace(step_drafts=step_drafts),
        dp_group=group,
        model_executor=executor,
        calls=calls,
    )


def run_rank(rank: int, port: int, requests: list[list[int]], results) -> None:
    """Runs the steps of one rank; 0 requests are an idle step."""
    dist.init_process_group(
        "gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=len(requests)
    )
    engine = make_engine(dist.group.WORLD)
    policy, drafted = engine.scheduler.step_drafts.policy, []
    for step, n in enumerate(requests[rank]):
        drafted.append(choose(policy, n) if n else policy.agreed)
        if step % RANKS_AGREE_EVERY == 0:
            agree_on_drafts(engine)
    results.put((rank, drafted))


def test_ranks_draft_what_the_busiest_rank_would():
    """All ranks draft equally many, as loads change and a rank becomes idle.

    Regression: one request alone on a rank made all requests of other ranks draft as
    many tokens.
    """
    requests = [[8] * 8 + [0] * 9, [8] * 4 + [1] * 13]
    context = multiprocessing.get_context("fork")  # no need to import again
    results, port = context.Queue(), get_open_port()
    ranks = [
        context.Process(target=run_rank, args=(rank, port, requests, results))
        for rank in range(2)
    ]
    for rank in ranks:
        rank.start()
    drafted = dict(results.get(timeout=120) for _ in ranks)
    for rank in ranks:
        rank.join()
    assert drafted[0] == drafted[1] == [3] + [0] * 12 + [3] * 4


def test_idle_rank_asks_for_no_drafts():
    policy = make_engine().scheduler.step_drafts.policy
    assert choose(policy, 1) == 3  # before the first agreement
    assert [policy.proposed_length() for _ in range(2)] == [(1, 3), (0, 0)]
    policy.agreed = 1
    assert [choose(policy, n) for n in (1, 8)] == [1, 1]


def test_idle_drafts_are_sent_to_workers_once():
    engine = make_engine()
    policy, calls = engine.scheduler.step_drafts.policy, engine.calls
    for agreed in (3, 3, 0, 0):
        policy.agreed = agreed
        draft_as_agreed(engine)
    assert [call["args"] for call in calls] == [(3,), (0,)]
    worker = SimpleNamespace(model_runner=SimpleNamespace())
    set_idle_drafts(worker, 2)
    assert worker.model_runner.idle_drafts == 2


def test_a_scheduler_that_does_not_choose_has_nothing_to_agree_on():
    for scheduler in (SimpleNamespace(), SimpleNamespace(step_drafts=None)):
        engine = SimpleNamespace(scheduler=scheduler)
        draft_as_agreed(engine)
        agree_on_drafts(engine)
