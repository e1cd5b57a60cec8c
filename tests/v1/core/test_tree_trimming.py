# SPDX-License-Identifier: Apache-2.0
"""How many nodes of a batch's trees are verified, and what is told of them."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from vllm.v1.core.sched.draft_load import ChosenLengths
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.tree_trimming import TreeTrimming, part_of
from vllm.v1.core.sched.trimming import Trimming
from vllm.v1.spec_decode.accepted_nodes import AcceptedNodes
from vllm.v1.spec_decode.dynamic.draft_length import DraftLengths, Load
from vllm.v1.worker.gpu.spec_decode import adaptive_verification
from vllm.v1.worker.gpu.spec_decode.draft_tree.trees import DraftTrees
from vllm.v1.worker.gpu.spec_decode.trimming import Trimming as WorkersTrimming

K, NODES, N = 3, 15, 8
NAMES = [str(i) for i in range(N)]
LOAD = Load(N, N, 100.0)


def seconds(rows: float) -> float:
    """A row costs so much that only likely nodes are worth one."""
    return 0.01 + 0.001 * rows


@pytest.fixture
def lengths() -> DraftLengths:
    row = {k: seconds(N * (k + 1)) for k in (K, NODES)}
    return DraftLengths(K, {256: {N: row}}, [NODES])


@pytest.fixture
def trimming(lengths) -> Trimming:
    parts = {rows: seconds(rows) for rows in (32, 64, 128)}
    trees = TreeTrimming(lengths, {N: parts}, NODES)
    chains = {k: seconds(N * (k + 1)) for k in (1, 2, 3)}
    return Trimming(lengths, {N: chains}, trees)


def make_step(nodes: int = NODES, **more) -> SchedulerOutput:
    step = SchedulerOutput.make_empty()
    step.scheduled_spec_decode_tokens = {name: [-1] * nodes for name in NAMES}
    step.num_scheduled_tokens = dict.fromkeys(NAMES, nodes + 1)
    step.num_spec_tokens_to_schedule = nodes
    for name, value in more.items():
        setattr(step, name, value)
    return step


def make_output(chance: float, verified: int, path: list[int]) -> SimpleNamespace:
    """Of trees whose nodes have each `chance` times the probability of the one before;
    nodes 1, 4 and 7 are the chain."""
    told = np.full((N, NODES + K + 1), chance, dtype=np.float32)
    told[:, NODES:] = 1, 4, 7, verified
    nodes = np.zeros((2, N, K + 1), dtype=np.int32)
    nodes[0, :, 1 : len(path) + 1] = path
    tokens = [[0] * (len(path) + 1) for _ in NAMES]
    return SimpleNamespace(
        req_ids=NAMES,
        verified_drafts=told,
        accepted_nodes=nodes,
        sampled_token_ids=tokens,
    )


def test_likely_nodes_are_worth_more_rows(trimming):
    """By what was told one step before, and by averages as long as nothing is."""
    trimming.gains(LOAD)
    assert 0 < trimming.budget(make_step()) < N * NODES
    budgets = []
    for chance in (0.3, 0.95):
        trimming.take(make_step(), make_output(chance, NODES, [1, 2, 3]))
        budgets.append(trimming.budget(make_step()) or N * NODES)
    assert 0 < budgets[0] < budgets[1]


def test_a_step_with_prompts_has_a_budget_too(trimming):
    """Else whole trees would stand beside them, of which a large batch has many."""
    step = make_step()
    step.num_scheduled_tokens["new"] = 20
    trimming.gains(LOAD)
    assert 0 < trimming.budget(step) < N * NODES


@pytest.mark.parametrize(
    "step",
    [make_step(nodes=11), make_step(has_structured_output_requests=True)],
    ids=["trees of another size", "a grammar"],
)
def test_other_trees_are_verified_whole(trimming, step):
    trimming.gains(LOAD)
    assert trimming.budget(step) is None


@pytest.mark.parametrize("path", [[1, 2, 3], []])
def test_chances_follow_what_is_accepted(trimming, path: list[int]):
    """By the numbers of a path's nodes; those not verified say nothing."""
    for _ in range(40):
        trimming.take(make_step(), make_output(0.8, 3, path))
    found, told = trimming._trees._of(["0"])[0], 0.8 ** np.arange(1, NODES + 1)
    assert (np.diff(found) <= 0).all()
    assert (found[:3] > told[:3]).all() if path else (found[:3] < told[:3]).all()


def test_parts_of_trees_are_counted_by_chances_of_the_rest(trimming):
    step = make_step(verify_budget=5 * N)
    trimming.take(step, make_output(0.9, 5, [1, 4]))
    assert step.num_invalid_spec_tokens == dict.fromkeys(NAMES, NODES - 5)
    assert trimming.num_verified("0", NODES) == 5
    part, (chances,) = trimming.part("0"), trimming._trees._of(["0"])
    assert part.num_chain == 2
    assert part.rest_of_chain == [pytest.approx(chances[6] / chances[3])]
    assert part.unverified == [0.0] * 5 + chances[5:].tolist()
    assert 0.0 < chances[-1] < chances[5] < 1.0
    trimming.take(make_step(), make_output(0.9, NODES, [1, 4]))
    assert trimming.part("0") is None  # all of it was
    trimming.take(make_step(), SimpleNamespace(verified_drafts=None))
    assert trimming.part("0") is None


def test_trees_that_are_never_whole_are_chosen_by_what_parts_gain(lengths):
    """Of so many requests whole ones have too many rows to be thought of."""
    load = Load(32, 32, 100.0)
    assert NODES not in lengths._offered(load, {})
    assert NODES in lengths._offered(load, {NODES: 0.1})
    assert lengths.choose(load, {NODES: 9.0}) == NODES
    # Some of the requests can use no drafts: nothing is trimmed, and no tree is held.
    assert lengths.choose(load._replace(num_drafting=31)) == K


def test_what_a_part_accepts_is_expected_of_the_whole(lengths):
    """Whatever part of it is verified, as long as chances are right: also if more of
    those trees is that accept more."""
    rng, chain = np.random.default_rng(0), np.array([1, 2, 5])
    for _ in range(600):
        for rate, verified in ((0.3, 1), (0.8, 6)):
            chances = np.zeros(NODES)
            chances[chain - 1] = rate ** np.arange(1, K + 1)
            reached = int((rng.random(K) < rate).cumprod().sum())
            num_chain, *rest = part_of(chain, verified, chances)
            seen = chain[:reached][chain[:reached] <= verified].tolist()
            lengths.observe_part(num_chain, seen, len(seen), *rest)
        lengths.end_step()
    wanted = 1 + np.mean([0.3 + 0.3**2 + 0.3**3, 0.8 + 0.8**2 + 0.8**3])
    expected = lengths.expected_tokens()
    assert expected[K] == pytest.approx(wanted, abs=0.06)
    assert expected[NODES] == pytest.approx(wanted, abs=0.06)


def test_the_scheduler_counts_a_part_of_a_tree(trimming, lengths):
    """What requests are observed by, once a step's output was taken in."""
    chosen, seen = ChosenLengths.__new__(ChosenLengths), []
    chosen.lengths, chosen.trimming, chosen._limit = lengths, trimming, 1000
    lengths.observe_part = lambda *given: seen.append(given)
    trimming.take(make_step(verify_budget=5 * N), make_output(0.9, 5, [1, 4]))
    tree = AcceptedNodes([1, 4], [0, 1], K)
    chosen.observe(NODES, 2, SimpleNamespace(request_id="0", num_tokens=9), tree)
    part = trimming.part("0")
    assert seen == [(2, [1, 4], 1, part.rest_of_chain, part.unverified)]


# The workers' side.


class Worker(WorkersTrimming):
    """Of N requests, without a device."""

    def __init__(self, trees: DraftTrees):
        self._depth, self._trees, self._sampler = K, trees, SimpleNamespace()
        self._max_total_logits, self.num_bonus_tokens = 10**6, 1
        self._chances = torch.ones(N, K)
        self._batch_draft_capacity = torch.zeros(N, dtype=torch.int32)
        self._num_non_draft_tokens = torch.zeros(N, dtype=torch.int32)
        self._cu_num_logits, self.query_start_loc = torch.zeros(
            2, N + 1, dtype=torch.int32
        ).unbind()
        self._num_drafts = self._budget = 0


@pytest.mark.parametrize("budget", [1, 20, 77, N * NODES - 1])
def test_of_all_nodes_of_a_batch_the_likeliest_are_verified(monkeypatch, budget: int):
    monkeypatch.setattr(
        adaptive_verification,
        "_assign_draft_token_budget_compiled",
        adaptive_verification._assign_draft_token_budget,
    )
    rng = np.random.default_rng(budget)
    paths = -np.sort(-rng.random((N, NODES)), axis=1)
    trees = DraftTrees(N, K, NODES + 4, torch.device("cpu"))
    before = np.concatenate([np.ones((N, 1)), paths[:, :-1]], axis=1)
    trees.chances[:, :NODES] = torch.from_numpy(paths / before)
    trees.chances[:, NODES:] = 1.0  # of a larger tree before
    worker, states = Worker(trees), torch.from_numpy(rng.permutation(N))
    step = make_step(verify_budget=budget)
    assert worker.for_step(step) is worker
    drafts = step.scheduled_spec_decode_tokens
    assert worker.get_num_tokens(step.num_scheduled_tokens, drafts) == N + budget
    cu_num_logits, starts, num_drafts = worker.reallocate_drafts(NAMES, states)
    least = np.sort(paths, axis=None)[::-1][budget - 1]
    wanted = (paths[states.numpy()] >= least).sum(axis=1)
    assert num_drafts == budget == wanted.sum()
    assert (cu_num_logits.diff() - 1).tolist() == wanted.tolist()
    assert starts.tolist() == cu_num_logits.tolist()
