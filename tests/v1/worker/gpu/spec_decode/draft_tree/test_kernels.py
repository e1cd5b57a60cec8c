# SPDX-License-Identifier: Apache-2.0
"""Compares the draft tree kernels with `reference.py` on random trees."""

import itertools
import random
from types import SimpleNamespace

import pytest
import torch

from vllm.triton_utils.compiled import COMPILED
from vllm.v1.worker.gpu.spec_decode.unified.tree.accept import PathMover
from vllm.v1.worker.gpu.spec_decode.unified.tree.attend import Scores, attend_rows
from vllm.v1.worker.gpu.spec_decode.unified.tree.trees import (
    DraftTrees,
    TreeAttention,
    TreeRows,
    lay_out_rows,
)
from vllm.v1.worker.gpu.spec_decode.unified.tree.verify import walk_trees

from ..batches import DEVICE
from .reference import Node, ancestors, attend, best_first, scores_of, walk

R = 8  # request states
# Softcap, window, whether there are sinks, and whether the prefix is another kernel's.
WEIGHINGS = [(0.0, 0, False, True), (5.0, 0, True, True), (5.0, 0, False, False)]
WEIGHINGS += [(0.0, 5, True, False), (0.0, 40, False, False)]
needs_fp8 = pytest.mark.skipif(COMPILED, reason="Triton on a CPU has no fp8")


def tensor(values, dtype=torch.int32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def random_tree(
    rng: random.Random, depth: int, num_nodes: int, num_chain: int
) -> list[Node]:
    table = [
        sorted((rng.random() for _ in range(6)), reverse=True) for _ in range(depth)
    ]
    table = [[[p - 1 for p in row]] for row in table]
    return best_first(table, num_nodes, num_chain)[0]


def stored(trees: DraftTrees, state: int, nodes: list[Node]) -> None:
    for column, node in enumerate(nodes):
        trees.parents[state, column] = node.parent
        trees.depths[state, column] = node.depth
        trees.ranks[state, column] = node.rank


class Step:
    """A step of four requests: three with all or some nodes of trees, and a prompt."""

    def __init__(self, seed: int, num_nodes: int, depth: int = 3):
        rng = random.Random(seed)
        self.num_nodes, self.depth = num_nodes, depth
        self.trees = DraftTrees.chains(R, depth, num_nodes, DEVICE)
        self.states = rng.sample(range(R), 4)
        chains = [0, 0, min(depth, num_nodes), 0]
        self.nodes = [random_tree(rng, depth, num_nodes, chain) for chain in chains]
        for state, nodes in zip(self.states, self.nodes, strict=True):
            stored(self.trees, state, nodes)
        # Requests: whole tree; fewer drafts; leading known tokens; chunk of a prompt.
        self.drafts = [num_nodes, rng.randint(1, num_nodes), num_nodes, 0]
        self.leading = [0, 0, 2, 70]
        self.prefix = [rng.randint(1, 40) for _ in self.states]
        queries = [1 + d + c for d, c in zip(self.drafts, self.leading, strict=True)]
        self.starts = [*itertools.accumulate(queries, initial=0)]
        rows = (count + 1 for count in self.drafts)
        cu = [*itertools.accumulate(rows, initial=0)]
        self.cu_num_logits, self.query_start_loc = tensor(cu), tensor(self.starts)
        spans = list(zip(self.prefix, queries, strict=True))
        self.seq_lens = tensor([p + q for p, q in spans])
        self.idx_mapping = tensor(self.states, torch.int64)
        positions = [at for p, q in spans for at in range(p, p + q)]
        self.positions, self.num_reqs = tensor(positions, torch.int64), 4
        self.rows = TreeRows(R, 512, DEVICE)

    def lay_out(self) -> None:
        """The step has the fields of a batch that are read."""
        lay_out_rows(self.trees, self.rows, self)

    def seen(self, req: int) -> torch.Tensor:
        """[queries, queries] bool, which rows of its step each query attends to."""
        first, count = self.leading[req], self.drafts[req] + 1
        seen = torch.ones(first + count, first + count, dtype=torch.bool).tril()
        seen[first:, first:] = False
        for row in range(count):
            for other in ancestors(self.nodes[req], row):
                seen[first + row, first + other] = True
        return seen

    def attended(
        self, query: torch.Tensor, kv: list[torch.Tensor], scores: Scores
    ) -> torch.Tensor:
        """[q, heads, size], reference attention of the first requests.

        Args:
            query: [T, heads, size].
            kv: of these requests: [prefix and queries, 2, kv_heads, size] each.
        """
        found = []
        for req, (keys, values) in enumerate(rows.unbind(1) for rows in kv):
            rows = slice(self.starts[req], self.starts[req + 1])
            seen, first = self.seen(req), self.leading[req]
            nodes = self.nodes[req][: self.drafts[req]]
            places = [*range(first), first, *(first + node.depth for node in nodes)]
            own = query[rows], keys, values, scores, seen, torch.tensor(places)
            found.append(attend(*own))
        return torch.cat(found)

    def attended_prefix(
        self, query: torch.Tensor, kv: list[torch.Tensor], scores: Scores
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As FlashAttention returns it: [q, heads, size], and [heads, q] float32, the
        log-sum-exp of the scores. It is infinite for rows without a prefix."""
        found, alone = [], scores._replace(sinks=None)
        for req, all_rows in enumerate(kv):
            rows = query[self.starts[req] : self.starts[req + 1]]
            keys, values = all_rows[: self.prefix[req]].unbind(1)
            lse = scores_of(rows, keys, scores).logsumexp(-1)
            seen = torch.ones(len(rows), 0, dtype=torch.bool)
            out = attend(rows, keys, values, alone, seen, torch.zeros(0))
            found.append((out, lse if len(keys) else -lse))
        return torch.cat([out for out, _ in found]), torch.cat(
            [lse for _, lse in found], 1
        )


@pytest.mark.parametrize("num_nodes", [3, 9, 40, 100])
def test_rows_have_positions_by_depth_and_see_ancestors(num_nodes: int):
    step = Step(num_nodes, num_nodes)
    step.lay_out()
    for req in range(4):
        begin = step.starts[req]
        first = begin + step.leading[req]
        assert step.rows.prefix_lens[req] == step.prefix[req]
        assert step.rows.num_leading[req] == step.leading[req]
        for row in range(step.drafts[req] + 1):
            depth = step.nodes[req][row - 1].depth if row else 0
            position = step.prefix[req] + step.leading[req] + depth
            assert step.positions[first + row] == position
            assert step.rows.depths[first + row] == depth
            low, high = step.rows.masks[first + row].tolist()
            bits = (low & (2**64 - 1)) | (high & (2**64 - 1)) << 64
            seen = {j for j in range(128) if bits >> j & 1}
            assert seen == ancestors(step.nodes[req], row)
    assert not step.rows.prefix_lens[4:].any()


@pytest.mark.parametrize("has_trees", [True, False])
@pytest.mark.parametrize("num_nodes", [3, 9, 40, 100])
def test_walk_follows_sampled_tokens(num_nodes: int, has_trees: bool):
    step, rng = Step(num_nodes, num_nodes), random.Random(num_nodes)
    rows = int(step.cu_num_logits[-1])
    # A small vocabulary, so that paths get long; siblings have different tokens.
    nodes = [0] * rows
    for req, (first, count) in enumerate(
        zip(step.cu_num_logits[:-1], step.drafts, strict=True)
    ):
        for row in range(1, count + 1):
            node = step.nodes[req][row - 1]
            nodes[first + row] = (node.depth * 3 + node.rank) % 7
    drawn = [rng.randrange(7) for _ in range(rows)]
    invalid = rng.randrange(1, rows)
    nodes[invalid] = -1
    chain_only = [False, False, True, False]
    sampled, num_sampled, (path, ranks) = walk_trees(
        step.trees,
        tensor(drawn, torch.int64),
        tensor(nodes),
        step.cu_num_logits,
        step.idx_mapping,
        tensor(chain_only, torch.bool),
        step.depth + 1,
        has_trees,
    )
    for req in range(len(step.drafts)):
        own = slice(step.cu_num_logits[req], step.cu_num_logits[req + 1])
        chain = [Node(depth, depth + 1, 0) for depth in range(step.depth)]
        laid_out = step.nodes[req] if has_trees else chain
        wanted = walk(laid_out, nodes[own], drawn[own], chain_only[req])
        number = int(num_sampled[req])
        assert (sampled[req, :number].tolist(), path[req, :number].tolist()) == wanted
        of_path = [laid_out[row - 1].rank if row else 0 for row in wanted[1]]
        assert ranks[req, :number].tolist() == of_path


@pytest.mark.parametrize("is_fp8", [False, pytest.param(True, marks=needs_fp8)])
@pytest.mark.parametrize("with_prompt", [False, True])
@pytest.mark.parametrize("softcap, window, has_sinks, has_prefix", WEIGHINGS)
@pytest.mark.parametrize("num_nodes", [3, 20, 100])
def test_rows_attend_to_prefix_and_ancestors(
    num_nodes, softcap, window, has_sinks, has_prefix, with_prompt, is_fp8
):
    """All keys are in KV cache blocks; one request has no prefix."""
    step = Step(num_nodes, num_nodes)
    step.prefix[1], step.seq_lens[1] = 0, step.drafts[1] + 1
    step.lay_out()
    torch.manual_seed(0)
    heads, kv_heads, size = 4, 2, 24
    # In memory, heads come after slots.
    pool = torch.randn(40, 16, kv_heads, 2 * size, device=DEVICE)
    table = torch.randperm(40, device=DEVICE).int().view(4, 10)
    query = torch.randn(step.starts[-1], heads, size, device=DEVICE)
    out, scales, whole, stored = torch.full_like(query, 9.0), None, query, pool
    if is_fp8:
        query, pool = (x.to(torch.float8_e4m3fn) for x in (query, pool))
        # A scale of all heads, one by head, and as checkpoints have one of all heads.
        scales = [tensor(x, torch.float32) for x in (0.5, [0.7, 1.3], [1.7])]
        whole = query.float() * scales[0]
        of_kv = [x.expand(kv_heads)[:, None].expand(-1, size) for x in scales[1:]]
        stored = pool.float() * torch.cat(of_kv, 1)
    sinks = torch.randn(heads, device=DEVICE) if has_sinks else None
    scores = Scores(0.3, softcap, window, sinks, scales)
    n, longest = 3 + with_prompt, max(b - a for a, b in itertools.pairwise(step.starts))
    of_tree = num_nodes + 1
    tree = TreeAttention(step.rows, n, step.starts[n], with_prompt, longest, of_tree)
    metadata = SimpleNamespace(
        query_start_loc=step.query_start_loc, block_table=table, draft_tree=tree
    )
    kv = [stored[blocks.long()].flatten(0, 1) for blocks in table[:n]]
    kv = [
        rows[:length].unflatten(-1, (2, size)).transpose(1, 2)
        for rows, length in zip(kv, step.seq_lens.tolist(), strict=False)
    ]
    wanted = out.clone()
    wanted[: step.starts[n]] = step.attended(whole, kv, scores)
    prefix = step.attended_prefix(whole, kv, scores) if has_prefix else None
    rows = query[: step.starts[n]]
    attend_rows(rows, pool.transpose(1, 2), metadata, scores, out, prefix)
    torch.testing.assert_close(out, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_accepted_kv_is_moved_to_its_positions(dtype: torch.dtype):
    torch.manual_seed(0)
    blocks, heads, size, width = 10, 3, 4, 12
    # In memory, heads come after slots: strides differ from the order of dimensions.
    base = torch.rand(2, blocks, size, heads, 2 * width).mul(255).to(DEVICE, dtype)
    caches = {str(i): base[i].transpose(1, 2) for i in range(2)}
    caches["shared"] = caches["0"]
    groups = {"0": 0, "1": 1, "shared": 0}
    # A layer of another group has other blocks of the same memory.
    caches["other"], groups["other"] = caches["0"], 2
    slots = torch.randperm(blocks * size)
    slot_mappings = torch.stack(
        [slots[:16], torch.randperm(blocks * size)[:16], slots[16:32]]
    ).to(DEVICE)
    path = tensor([[0, 2, 3, 6], [0, 1, 2, 3], [0, 4, 99, 99]])
    num_sampled, first_rows = tensor([4, 4, 2]), tensor([0, 7, 11])
    wanted = base.clone()
    flat = wanted.view(2, blocks * size, heads, 2 * width)
    before = flat.clone()
    for req, moves in enumerate([[(2, 1), (3, 2), (6, 3)], [], [(4, 1)]]):
        for source, to in moves:
            for group, layer in enumerate([0, 1, 0]):
                slots = slot_mappings[group, int(first_rows[req]) :]
                flat[layer, slots[to]] = before[layer, slots[source]]
    PathMover(caches, groups)(slot_mappings, path, num_sampled, first_rows)
    assert torch.equal(base, wanted)
