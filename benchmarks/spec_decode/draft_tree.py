# SPDX-License-Identifier: Apache-2.0
"""What each part of a draft tree costs a step, beside what a chain costs; README.md.

Every part runs in a CUDA graph, many times over, with a target of Llama-3.1-8B's shape.
"""

import argparse
import datetime
import random
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.spec_decode import results as files
from benchmarks.spec_decode.device import describe
from vllm.config.drafter import num_candidates
from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func
from vllm.v1.worker.gpu.spec_decode.draft_tree.attention import merge_tree
from vllm.v1.worker.gpu.spec_decode.draft_tree.candidates import best_candidates
from vllm.v1.worker.gpu.spec_decode.draft_tree.kv_move import PathMover
from vllm.v1.worker.gpu.spec_decode.draft_tree.topology import grow_trees
from vllm.v1.worker.gpu.spec_decode.draft_tree.trees import (
    DraftTrees,
    TreeAttention,
    TreeRows,
    lay_out_rows,
)
from vllm.v1.worker.gpu.spec_decode.draft_tree.verify import walk_trees

LAYERS, HEADS, KV_HEADS, HEAD_SIZE, BLOCK_SIZE, VOCAB = 32, 32, 8, 128, 16, 128256
MAX_LEN = 32768
FA_VERSION = 3


def seconds(part: Callable[[], object], times: int = 32, repeats: int = 10) -> float:
    """Of one call, of many in a graph."""
    part()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(times):
            part()
    graph.replay()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(repeats):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1e3 / (times * repeats)


class Step:
    """A step of n requests with a tree of N nodes each, `context` tokens behind them.

    Args:
        num_reqs: n.
        num_nodes: N.
        depth: K.
        context: tokens before each request's rows.
    """

    def __init__(self, num_reqs: int, num_nodes: int, depth: int, context: int):
        self.n, self.nodes, self.depth, self.context = (
            num_reqs,
            num_nodes,
            depth,
            context,
        )
        self.width = num_nodes + 1
        torch.manual_seed(0)
        device = torch.device("cuda")
        self.trees = DraftTrees(num_reqs, depth, num_nodes, device)
        self.rows = TreeRows(num_reqs, num_reqs * self.width, device)
        int32 = {"dtype": torch.int32, "device": device}
        self.starts = torch.arange(num_reqs + 1, **int32) * self.width
        self.seq_lens = torch.full((num_reqs,), context + self.width, **int32)
        self.states = torch.arange(num_reqs, device=device)
        self.positions = torch.arange(num_reqs * self.width, device=device)
        self.draft_tokens = torch.zeros(
            num_reqs, num_nodes, dtype=torch.int64, device=device
        )
        self.logits = torch.randn(
            num_reqs * depth, VOCAB, device=device, dtype=torch.bfloat16
        )
        self.log_probs, self.tokens = best_candidates(
            self.logits * 4, num_candidates(num_nodes)
        )
        self.chain_only = torch.zeros(num_reqs, dtype=torch.bool, device=device)
        self.grow()
        self.path = torch.zeros(num_reqs, depth + 1, **int32)
        self.path[:, 1:] = self._some_path()
        self.num_sampled = torch.full((num_reqs,), 5, **int32)
        self.rejected = torch.full((num_reqs,), self.width - 5, **int32)
        self.sampled = torch.zeros(num_reqs, self.width, dtype=torch.int64).cuda()
        self.drawn = torch.zeros(num_reqs * self.width, dtype=torch.int64).cuda()
        self._make_kv(device)

    def _some_path(self) -> torch.Tensor:
        """Nodes that all have to be moved, since they are not the chain's."""
        beyond = range(self.depth, self.nodes + 1)
        at = sorted(random.Random(0).sample(beyond, self.depth))
        return torch.tensor(at, dtype=torch.int32, device="cuda")

    def _make_kv(self, device: torch.device) -> None:
        per_request = (self.context + self.width) // BLOCK_SIZE + 1
        shape = (self.n * per_request, BLOCK_SIZE, KV_HEADS, 2 * HEAD_SIZE)
        self.caches = [
            torch.randn(shape, device=device, dtype=torch.bfloat16).transpose(1, 2)
            for _ in range(LAYERS)
        ]
        self.block_table = torch.arange(
            self.n * per_request, dtype=torch.int32, device=device
        ).view(self.n, per_request)
        first = self.states[:, None] * per_request * BLOCK_SIZE + self.context
        offsets = torch.arange(self.width, device=device)
        self.slots = (first + offsets).view(1, -1)
        names = {str(i): cache for i, cache in enumerate(self.caches)}
        self.mover = PathMover(names, dict.fromkeys(names, 0))
        rows = self.n * self.width
        self.query = torch.randn(
            rows, HEADS, HEAD_SIZE, device=device, dtype=torch.bfloat16
        )
        self.kv = torch.randn(
            2, rows, KV_HEADS, HEAD_SIZE, device=device, dtype=torch.bfloat16
        )
        for cache in self.caches[:1]:
            flat = cache.transpose(1, 2).reshape(-1, KV_HEADS, 2 * HEAD_SIZE)
            flat[self.slots[0]] = torch.cat([self.kv[0], self.kv[1]], -1)
            cache.transpose(1, 2).copy_(flat.view(shape))
        self.out = torch.empty_like(self.query)

    # The parts.

    def argmax(self) -> torch.Tensor:
        return self.logits.argmax(-1)

    def candidates(self) -> object:
        return best_candidates(self.logits, num_candidates(self.nodes))

    def grow(self) -> None:
        states = self.states.repeat_interleave(self.depth)
        grow_trees(
            self.log_probs,
            self.tokens,
            states,
            self.states,
            self.chain_only,
            self.trees,
            self.draft_tokens,
            self.nodes,
        )

    def lay_out(self) -> None:
        lay_out_rows(
            self.trees,
            self.rows,
            self.states,
            self.starts,
            self.starts,
            self.seq_lens,
            self.positions,
        )

    def _attend(self, causal: bool, lens: torch.Tensor, cache: torch.Tensor):
        keys, values = cache.transpose(1, 2).split(HEAD_SIZE, dim=-1)
        return flash_attn_varlen_func(
            q=self.query,
            k=keys,
            v=values,
            cu_seqlens_q=self.starts,
            max_seqlen_q=self.width,
            seqused_k=lens,
            max_seqlen_k=MAX_LEN,
            softmax_scale=HEAD_SIZE**-0.5,
            causal=causal,
            block_table=self.block_table,
            return_softmax_lse=not causal,
            fa_version=FA_VERSION,
        )

    def chain_attention(self) -> None:
        for cache in self.caches:
            self._attend(True, self.seq_lens, cache)

    def tree_attention(self) -> None:
        for cache in self.caches:
            self.attend_layer(cache)

    def attend_layer(self, cache: torch.Tensor) -> None:
        out, lse = self._attend(False, self.rows.prefix_lens, cache)
        merge_tree(
            self.query,
            *self.kv,
            out,
            lse,
            self.out,
            self.starts,
            TreeAttention(self.rows, self.n, len(self.query), True, self.width),
            HEAD_SIZE**-0.5,
        )

    def walk(self) -> None:
        walk_trees(
            self.trees,
            self.drawn,
            self.drawn,
            self.starts,
            self.states,
            self.chain_only,
            self.sampled,
            self.num_sampled.clone(),
            self.path.clone(),
            torch.empty_like(self.path),
        )

    def move(self) -> None:
        self.mover(self.slots, self.path, self.num_sampled, self.starts[:-1])

    def check(self) -> None:
        """Attention of one layer against a dense one."""
        self.lay_out()
        self.attend_layer(self.caches[0])
        flat = self.caches[0].transpose(1, 2).reshape(self.n, -1, KV_HEADS, 256)
        bits = torch.arange(self.width, device="cuda")
        for req in (0, self.n - 1):
            rows = slice(req * self.width, (req + 1) * self.width)
            words = self.rows.masks[rows]
            seen = (words[:, bits // 64] >> (bits % 64) & 1).bool()
            past = torch.ones(self.width, self.context, dtype=torch.bool).cuda()
            kv = flat[req, : self.context + self.width].float()
            keys, values = kv.repeat_interleave(HEADS // KV_HEADS, 1).split(128, -1)
            scores = torch.einsum("qhd,khd->hqk", self.query[rows].float(), keys)
            scores *= HEAD_SIZE**-0.5
            scores.masked_fill_(~torch.cat([past, seen], 1), -torch.inf)
            wanted = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)
            found = self.out[rows].float()
            error = ((found - wanted).norm() / wanted.norm()).item()
            assert error < 1e-2, f"tree attention is off by {error}"


def measure(step: Step) -> dict[str, float]:
    """Seconds of each part; those of attention and moving are of all layers."""
    step.check()
    parts = {
        "argmax": step.argmax,
        "candidates": step.candidates,
        "grow": step.grow,
        "lay_out": step.lay_out,
        "walk": step.walk,
        "move": step.move,
    }
    found = {name: seconds(part) for name, part in parts.items()}
    for name in ("chain_attention", "tree_attention"):
        found[name] = seconds(getattr(step, name), times=2)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--batch-size", type=int, nargs="+", default=[1, 2, 4, 8])
    add("--num-nodes", type=int, nargs="+", default=[15, 31, 63])
    add("--context", type=int, nargs="+", default=[512, 4096, 16384])
    add("--num-speculative-tokens", type=int, default=8)
    add("--gpu", help="name of the results folder; detected by default")
    add("--output", type=Path, help="results file")
    args = parser.parse_args()
    device = describe()
    name = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    found = {}
    for context in args.context:
        for n in args.batch_size:
            for nodes in args.num_nodes:
                step = Step(n, nodes, args.num_speculative_tokens, context)
                key = f"L{context}/n{n}/N{nodes}"
                found[key] = {**measure(step), "run": name}
                shown = {
                    k: round(v * 1e6, 1) for k, v in found[key].items() if k != "run"
                }
                print(key, shown, flush=True)
                del step
                torch.cuda.empty_cache()
    results = {
        "runs": {name: {"command": files.command_line("draft_tree"), "device": device}},
        "measurements": found,
    }
    folder = files.RESULTS / files.slug(args.gpu or str(device["name"]))
    files.save(args.output or folder / "draft-tree.json", results)


if __name__ == "__main__":
    main()
