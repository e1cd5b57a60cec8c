# SPDX-License-Identifier: Apache-2.0
"""Replays recorded step times and acceptance through "auto", without a device.

    python -m benchmarks.spec_decode.replay_auto

Step times are those of fixed draft lengths on an H200 (`step_times.json`, in ms by
drafter, requests and drafts), acceptance is that of `traces/`: what "auto" chooses is
compared with the best fixed plan of each load.
Times at start are off by some per cent and by more for one plan, and steps of the same
plan differ as those of an engine do. Outcomes are known one step later, as with
asynchronous scheduling.
"""

import argparse
import json
from collections import defaultdict, deque
from collections.abc import Iterator
from functools import cache
from itertools import islice, product
from pathlib import Path
from statistics import geometric_mean
from typing import Any, NamedTuple

import numpy as np

from benchmarks.spec_decode.traces import Trace
from vllm.config.drafter import depth_with_passes
from vllm.v1.core.sched.draft_policy import HELD, OBSERVED, REPORTED_EVERY
from vllm.v1.spec_decode.auto.acceptance import NUM_KINDS, Verified, kind_of
from vllm.v1.spec_decode.auto.chooser import Chooser, Load
from vllm.v1.spec_decode.auto.verify import PartialSteps
from vllm.v1.spec_decode.graph_sizes import graph_rows

STEP_TIMES = Path(__file__).with_name("step_times.json")
CHAINS = (0, 1, 2, 3, 4, 5, 7, 8)
ONE_PASS = ("pard", "peagle")
DEPTH, CONTEXT, LEAST_TRIMMED, MOST_TREE_ROWS = 8, 256, 64, 256
ROWS = 4096  # of each recording
SWITCH = 0.3  # steps that a change of plan takes in addition
PRICE_S = 2e-4  # of trimming a step
TEMPERATURES = {"greedy": 0.0, "t0.5": 0.5, "t0.8": 0.8}


class Phase(NamedTuple):
    """A load for some seconds."""

    num_reqs: int
    text: str
    seconds: float


LOADS = [
    *([Phase(n, text, 8.0)] for n in (1, 8, 32, 64) for text in ("greedy", "t0.5")),
    [Phase(n, "t0.5", 1.5) for n in (8, 16, 32, 64, 32, 16, 8, 4, 2, 1) * 3],
    [Phase(n, t, 1.5) for n in (1, 8, 32) for t in ("greedy", "t0.8", "t0.5") * 2],
    [Phase(64, text, 1.5) for text in ("greedy", "t0.8") * 4],
]


class Step(NamedTuple):
    """A step whose outcome is known.

    Attributes:
        plan, budget: what it verified, and drafts of all; None: each of them.
        drafted: the plan that it drafted.
        seconds: that it took.
        load: of its requests.
        verified: what came of each request's drafts.
        probs: [n, K], the drafter's confidence.
    """

    plan: int
    budget: int | None
    drafted: int
    seconds: float
    load: Load
    verified: list[Verified]
    probs: np.ndarray


def on_line(x: float, xs: list[float], ys: list[float]) -> float:
    """Between points, and beyond the last on the last line."""
    slope = (ys[-1] - ys[-2]) / (xs[-1] - xs[-2])
    return float(np.interp(x, xs, ys) + max(0.0, x - xs[-1]) * slope)


class Times:
    """Seconds of a step for any load and plan, on lines through what was recorded."""

    def __init__(self, drafter: str):
        recorded = json.loads(STEP_TIMES.read_text())[drafter]
        self.largest = max(map(int, recorded))
        # By chain or tree: numbers of requests and milliseconds.
        self._known: dict[int, list[tuple[int, float]]] = defaultdict(list)
        for n, row in recorded.items():
            # Without drafts: the target.
            ms = {0: 0.85 * min(row.values())} | {int(k): row[k] for k in row}
            chain = {k: ms[k] for k in ms if k <= DEPTH}
            for k in range(DEPTH + 1):
                ms[k] = on_line(k, [*chain], [*chain.values()])
            for k in ms:
                self._known[k].append((int(n), ms[k]))
        trees = sorted(k for k in self._known if k > DEPTH and len(self._known[k]) > 1)
        self.plans = [*CHAINS, *trees]

    def seconds(self, n: int, plan: float) -> float:
        """Of a plan, or of a chain's mean number of verified drafts."""
        if plan > DEPTH or plan == int(plan):
            return on_line(n, *zip(*self._known[int(plan)], strict=True)) / 1e3
        low = int(plan)
        first, second = self.seconds(n, low), self.seconds(n, low + 1)
        return first + (plan - low) * (second - first)

    def trimmed(self, n: int, drafted: int, verified: float) -> float:
        per_draft = 1e-5 + 2e-7 * n
        return self.seconds(n, verified) + per_draft * (drafted - verified) + PRICE_S

    def measured(self, rng: np.random.Generator) -> tuple[dict, dict]:
        """Times at start, as `Table` and `Curves`."""
        noise = {plan: np.exp(rng.normal(0, 0.02)) for plan in self.plans}
        noise[self.plans[rng.integers(len(self.plans))]] *= 1.15
        sizes = [n for n in (1, 2, 4, 8, 16, 32, 64, 128) if n <= self.largest]
        table = {
            n: {p: noise[p] * self.seconds(n, p) for p in self.plans} for n in sizes
        }
        parts = [0.5, *map(float, CHAINS[1:])]
        curves = {
            n: {m: self.trimmed(n, DEPTH, m) for m in parts} for n in sizes if n >= 32
        }
        return {CONTEXT: table}, curves


def depth_of(drafter: str, nodes: int) -> int:
    """Trees of drafters with several passes are less deep if they are small."""
    return DEPTH if drafter in ONE_PASS else depth_with_passes(nodes, DEPTH)


recording = cache(Trace.load)


@cache
def paths(drafter: str, text: str, plan: int) -> list[list[int]]:
    """Accepted nodes of a tree, by row of the recording."""
    trace = recording(f"{drafter}-{text}").within(depth_of(drafter, plan))
    return [row[row <= plan].tolist() for row in trace.path[:ROWS]]


class Engine:
    """Serves phases of load, and counts tokens; every request has the same text,
    whatever is drafted for it.

    Attributes:
        rows: of the recording, at which requests begin, by their number.
        ages: tokens of the running requests, by number.
    """

    def __init__(self, drafter: str, times: Times, seed: int, length: int = 256):
        self.drafter, self.times, self.length = drafter, times, length
        self.rng, self.text = (np.random.default_rng(each) for each in (seed, 0))
        self.rows: list[int] = []
        self.ages: dict[int, int] = {}
        self.level = 0.0

    def _load(self, phase: Phase) -> Load:
        """Requests end and begin."""
        n = phase.num_reqs
        for name in [name for name, age in self.ages.items() if age >= self.length]:
            del self.ages[name]
        while len(self.ages) > n:
            self.ages.popitem()
        while len(self.ages) < n:
            self.ages[len(self.rows)] = 0
            self.rows.append(int(self.text.integers(ROWS)))
        kind = kind_of(TEMPERATURES[phase.text])
        shares = tuple(float(each == kind) for each in range(NUM_KINDS))
        return Load(n, n, CONTEXT + sum(self.ages.values()) / n, shares=shares)

    def _noise(self) -> float:
        self.level = 0.98 * self.level + self.rng.normal(0, 0.01)
        pause = 1.2 if self.rng.random() < 0.1 else 1.0
        return float(np.exp(self.level + self.rng.normal(0, 0.02)) * pause)

    def run(self, phases: list[Phase], policy: "Auto | int") -> float:
        """Tokens per second."""
        tokens = seconds = 0.0
        drafted, pending = 0, deque([None, None])
        for phase in phases:
            end = seconds + phase.seconds
            while seconds < end:
                load, plan, budget = self._load(phase), drafted, None
                if isinstance(policy, int):
                    drafted = policy
                else:
                    if (last := pending.popleft()) is not None:
                        policy.observe(last)
                    drafted = policy.choose([*self.ages][-1], load)
                    budget = policy.budget(load, plan) if 0 < plan <= DEPTH else None
                step = self._step(phase.text, load, plan, drafted, budget)
                pending.append(step)
                seconds += step.seconds
                tokens += sum(len(each.accepted) + 1 for each in step.verified)
        return tokens / seconds

    def _step(
        self, text: str, load: Load, plan: int, drafted: int, budget: int | None
    ) -> Step:
        trace, n = recording(f"{self.drafter}-{text}"), load.num_reqs
        longest, confidence = trace.chain[:ROWS], trace.confidence[:ROWS]
        at = [(self.rows[name] + age) % len(longest) for name, age in self.ages.items()]
        probs, sizes = confidence[at], [plan] * n
        seconds = self.times.seconds(n, plan)
        if budget is not None:
            reached = probs[:, :plan].cumprod(axis=1)
            least = np.sort(reached, axis=None)[-max(budget, 1)]
            sizes = (reached >= least).sum(axis=1).tolist()
            seconds = self.times.trimmed(n, plan, budget / n)
        verified = []
        for name, row, size in zip(self.ages, at, sizes, strict=True):
            nodes = [*range(1, min(int(longest[row]), size) + 1)]
            num_best = len(nodes)
            if plan > DEPTH:
                nodes = paths(self.drafter, text, plan)[row]
                num_best = min(num_best, len(nodes))
            verified.append(Verified(size, nodes, num_best))
            self.ages[name] += len(nodes) + 1
        seconds *= self._noise() * (1 + SWITCH * (drafted != plan))
        return Step(plan, budget, drafted, seconds, load, verified, probs)


class Auto:
    """The engine's chooser, with what the scheduler does around it."""

    def __init__(self, drafter: str, times: Times, rng: np.random.Generator):
        measured, trimmed = times.measured(rng)
        partial = None
        if drafter in ONE_PASS:
            partial = PartialSteps(trimmed, LEAST_TRIMMED, graph_rows)
        trees = {n: depth_of(drafter, n) for n in times.plans if n > DEPTH}
        self.chooser = Chooser(DEPTH, measured, trees, partial)
        self.load: Any = None
        self.batch: Any = None
        self.elapsed, self.steps, self.last = 0, 0, None

    def choose(self, newest: int, load: Load) -> int:
        self.elapsed += 1
        batch, plan = (load.num_reqs, newest), self.chooser.plan
        if plan is not None and batch == self.batch and self.elapsed < HELD:
            return plan
        elapsed, self.elapsed, self.load = self.elapsed, 0, load
        chosen = self.chooser.choose(load, elapsed)
        self.batch = batch if self.chooser.trial is None else None
        return chosen

    def budget(self, load: Load, num_drafts: int) -> int | None:
        verifier = self.chooser.verifier
        if verifier is None or load.num_reqs < LEAST_TRIMMED:
            return None
        verifier.count(True)
        return verifier.best(load.num_reqs, num_drafts, self.load).num_drafts

    def observe(self, step: Step) -> None:
        is_partial, load = step.budget is not None, step.load
        verifier = self.chooser.verifier
        kind = step.plan, step.drafted, load.num_reqs, is_partial
        if step.plan == step.drafted and kind == self.last:
            how = step.plan, step.seconds, step.budget
            self.chooser.observe_seconds(load.num_reqs, load.context, *how)
        self.last, self.steps = kind, self.steps + 1
        is_report = self.steps % REPORTED_EVERY == 0 and 0 < step.plan <= DEPTH
        if is_report and verifier and load.num_reqs >= LEAST_TRIMMED:
            tokens = np.array([len(each.accepted) + 1 for each in step.verified])
            verifier.report(step.probs, tokens, np.full(len(tokens), step.plan))
        if is_partial and not is_report:
            return
        pairs = zip(step.verified, step.probs, strict=True)
        for drafts, probs in islice(pairs, OBSERVED):
            size, num_accepted = drafts.num_drafts, len(drafts.accepted)
            if is_partial and num_accepted == size:
                more = tuple(probs[size : min(num_accepted + 2, step.plan)])
                drafts = drafts._replace(unverified=more)
            if size or drafts.unverified:
                self.chooser.observe(drafts, load.shares.index(1.0))


def replay(drafter: str, phases: list[Phase], seeds: int) -> tuple[float, float]:
    """Tokens per second of "auto", and of the best fixed plan of each phase."""
    times, found = Times(drafter), []
    for seed in range(seeds):
        policy = Auto(drafter, times, np.random.default_rng(100 + seed))
        found.append(Engine(drafter, times, seed).run(phases, policy))
    best = [best_fixed(drafter, phase) * phase.seconds for phase in phases]
    return float(np.mean(found)), sum(best) / sum(phase.seconds for phase in phases)


@cache
def best_fixed(drafter: str, phase: Phase) -> float:
    times = Times(drafter)
    return max(
        Engine(drafter, times, 0).run([phase._replace(seconds=4.0)], plan)
        for plan in times.plans
        if plan <= DEPTH or phase.num_reqs * (plan + 1) <= MOST_TREE_ROWS
    )


def cases() -> Iterator[tuple[str, str, list[Phase]]]:
    """Drafters, names of loads, and their phases."""
    for drafter, phases in product(("peagle", "eagle3", "pard", "draft"), LOADS):
        if max(phase.num_reqs for phase in phases) <= Times(drafter).largest:
            texts = "/".join(sorted({phase.text for phase in phases}))
            load = f"{phases[0].num_reqs} requests" if len(phases) == 1 else "changing"
            yield drafter, f"{load}, {texts}", phases


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=4)
    args, shares = parser.parse_args(), []
    for drafter, name, phases in cases():
        found, best = replay(drafter, phases, args.seeds)
        shares.append(found / best)
        numbers = f"{found:9.0f} {best:9.0f} {found / best:.3f}"
        print(f"{drafter:8} {name:28} {numbers}", flush=True)
    print(f"geometric mean {geometric_mean(shares):.4f}, least {min(shares):.3f}")


if __name__ == "__main__":
    main()
