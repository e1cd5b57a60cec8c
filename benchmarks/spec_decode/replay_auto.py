# SPDX-License-Identifier: Apache-2.0
"""Replays recorded step times and acceptance through "auto", without a device.

    python -m benchmarks.spec_decode.replay_auto

Step times are those of fixed draft lengths in results/nvidia-h200/, acceptance is that
of `traces/`: what "auto" chooses is compared with the best fixed plan of each load.
Times at start are off by some per cent and by more for one plan, and steps of the same
plan differ as those of an engine do. Outcomes are known one step later, as with
asynchronous scheduling.
"""

import argparse
import json
from collections import deque
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, Protocol

import numpy as np

from benchmarks.spec_decode.traces import Trace, accepted_of_tree, among_candidates

RESULTS = Path(__file__).parents[1] / "results" / "nvidia-h200"
FILES = ("auto-all.json", "trimming.json", "auto.json")  # the last one counts
CHAINS = (0, 1, 2, 3, 4, 5, 7, 8)
DEPTH = 8
ROWS = 4096  # of each recording
SWITCH = 0.3  # steps that a change of plan takes in addition
PRICE_S = 2e-4  # of trimming a step


class Phase(NamedTuple):
    """A load for some seconds."""

    num_reqs: int
    text: str
    seconds: float


HELD = 4  # steps, as in the scheduler
TEMPERATURES = {"greedy": 0.0, "t0.5": 0.5, "t0.8": 0.8}
STEADY = [[Phase(n, text, 8.0)] for n in (1, 8, 32, 64) for text in ("greedy", "t0.5")]
CHANGING = [
    [Phase(n, "t0.5", 1.5) for n in (8, 16, 32, 64, 32, 16, 8, 4, 2, 1) * 3],
    [Phase(n, t, 1.5) for n in (1, 8, 32) for t in ("greedy", "t0.8", "t0.5") * 2],
]


class Policy(Protocol):
    """What is replayed."""

    def choose(self, names: list[str], ages: list[int], text: str) -> int: ...

    def budget(self, names: list[str], num_drafts: int) -> int | None: ...

    def observe(self, step: "Step", probs: np.ndarray) -> None: ...


class Step(NamedTuple):
    """A step whose outcome is known.

    Attributes:
        plan: what it verified.
        budget: drafts verified of all; None: all of them.
        drafted: what it drafted.
        seconds: that it took.
        names, ages: [n], of its requests; tokens of output before it.
        verified: [n], drafts that were verified.
        accepted: [n], numbers of the accepted nodes.
        num_best: [n], see `Verified`.
        text: recording.
    """

    plan: int
    budget: int | None
    drafted: int
    seconds: float
    names: list[str]
    ages: list[int]
    verified: list[int]
    accepted: list[list[int]]
    num_best: list[int]
    text: str


@cache
def recorded_ms(drafter: str) -> dict[int, dict[int, float]]:
    """Milliseconds of a step by number of requests and plan, as recorded."""
    found: dict[int, dict[int, float]] = {}
    for name in FILES:
        measured = json.loads((RESULTS / name).read_text())["measurements"]
        for key, entry in measured.items():
            _, method, plan, _, load = key.split("/")
            is_own = method == drafter or (method == "none" and plan == "K0")
            if not is_own or "@" in load or "a" in plan:
                continue
            drafts = int(plan.rpartition("tree")[2].removeprefix("K"))
            seconds = median(each["step_s"] for each in entry["repeats"])
            found.setdefault(int(load[1:]), {})[drafts] = 1e3 * seconds
    return found


class Times:
    """Seconds of a step for any load and plan, on lines through what was recorded."""

    def __init__(self, drafter: str):
        recorded = recorded_ms(drafter)
        chains = {n: r for n, r in recorded.items() if len(r) > 2}
        # Where trees were recorded at two sizes, the others are on a line.
        of_tree = {
            k: [(n, row[k]) for n, row in sorted(chains.items()) if k in row]
            for k in {k for row in chains.values() for k in row if k > DEPTH}
        }
        self._trees = {k: pts for k, pts in sorted(of_tree.items()) if len(pts) > 2}
        self.plans = [*CHAINS, *self._trees]
        self._sizes = sorted(chains)
        self._chains = np.array(
            [
                np.interp(np.arange(DEPTH + 1), *self._known(chains[n]))
                for n in self._sizes
            ]
        )

    def _known(self, row: dict[int, float]) -> tuple[list[int], list[float]]:
        known = sorted(k for k in row if k <= DEPTH)
        times = [row[k] for k in known]
        if known[0]:  # drafting nothing takes as long as the target
            known, times = [0, *known], [0.85 * times[0], *times]
        if known[-1] < DEPTH:
            slope = (times[-1] - times[-2]) / (known[-1] - known[-2])
            known, times = (
                [*known, DEPTH],
                [*times, times[-1] + slope * (DEPTH - known[-1])],
            )
        return known, times

    def seconds(self, n: int, plan: float) -> float:
        """Of a plan, or of a chain's mean number of verified drafts."""
        if plan in self._trees:
            sizes, times = zip(*self._trees[plan], strict=True)
            slope = (times[-1] - times[-2]) / (sizes[-1] - sizes[-2])
            beyond = max(0, n - sizes[-1]) * slope
            return float(np.interp(n, sizes, times) + beyond) / 1e3
        low = min(int(plan), DEPTH - 1)
        first, second = (
            np.interp(n, self._sizes, self._chains[:, k]) for k in (low, low + 1)
        )
        return float(first + (plan - low) * (second - first)) / 1e3

    def trimmed(self, n: int, drafted: int, verified: float) -> float:
        per_draft = 1e-5 + 2e-7 * n
        return self.seconds(n, verified) + per_draft * (drafted - verified) + PRICE_S

    def measured(self, rng: np.random.Generator) -> tuple[dict, dict]:
        """Times at start, as `Table` and `Curves`."""
        noise = {plan: np.exp(rng.normal(0, 0.02)) for plan in self.plans}
        noise[self.plans[rng.integers(len(self.plans))]] *= 1.15
        sizes = [n for n in (1, 2, 4, 8, 16, 32, 64, 128) if n <= self._sizes[-1]]
        table = {
            n: {p: noise[p] * self.seconds(n, p) for p in self.plans} for n in sizes
        }
        parts = [0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 7.0, 8.0]
        curves = {
            n: {m: self.trimmed(n, DEPTH, m) for m in parts} for n in sizes if n >= 32
        }
        return {256: table}, curves


@cache
def outcomes(drafter: str, text: str, plan: int) -> list[list[int]]:
    """Accepted nodes of a tree, by row of the recording."""
    from benchmarks.spec_decode.traces import best_first
    from vllm.config.drafter import num_candidates

    trace = Trace.load(f"{drafter}-{text}")
    is_ar = trace.continues_best
    probs = among_candidates(
        trace.probs[:ROWS, :DEPTH], num_candidates(plan, not is_ar)
    )
    grown = (
        best_first(row, num_nodes=plan, continues_best=is_ar)
        for row in np.log(probs).tolist()
    )
    ranks = trace.ranks[:ROWS, :DEPTH].tolist()
    return [accepted_of_tree(r, nodes) for r, nodes in zip(ranks, grown, strict=True)]


@cache
def chains(drafter: str, text: str) -> tuple[np.ndarray, np.ndarray]:
    """[rows], accepted drafts of the longest chain, and [rows, K], their confidence."""
    trace = Trace.load(f"{drafter}-{text}")
    accepted = (trace.ranks[:ROWS, :DEPTH] == 0).cumprod(1).sum(1)
    return accepted, trace.probs[:ROWS, :DEPTH, 0]


class Engine:
    """Serves requests of `length` tokens, by a policy or by one plan."""

    def __init__(self, drafter: str, times: Times, seed: int, length: int = 256):
        self.drafter, self.times, self.length = drafter, times, length
        # Requests have the same text, whatever is drafted for them.
        self.rng, self.text = (np.random.default_rng(each) for each in (seed, 0))
        self.rows: dict[str, int] = {}
        self.ages: dict[str, int] = {}
        self.number, self.level = 0, 0.0

    def _resize(self, n: int) -> list[str]:
        for name in [name for name, age in self.ages.items() if age >= self.length]:
            del self.ages[name]
        while len(self.ages) > n:
            self.ages.popitem()
        while len(self.ages) < n:
            self.number += 1
            self.rows[f"{self.number}"] = int(self.text.integers(ROWS))
            self.ages[f"{self.number}"] = 0
        return list(self.ages)

    def _noise(self) -> float:
        self.level = 0.98 * self.level + self.rng.normal(0, 0.01)
        pause = 1.2 if self.rng.random() < 0.1 else 1.0
        return float(np.exp(self.level + self.rng.normal(0, 0.02)) * pause)

    def run(self, phases: list[Phase], policy: Policy | int) -> float:
        """Tokens per second."""
        tokens = seconds = 0.0
        drafted, pending = 0, deque([None, None])
        for phase in phases:
            end = seconds + phase.seconds
            while seconds < end:
                names = self._resize(phase.num_reqs)
                plan, ages = drafted, [self.ages[name] for name in names]
                if isinstance(policy, int):
                    drafted, budget = policy, None
                else:
                    if (last := pending.popleft()) is not None:
                        policy.observe(*last)
                    drafted = policy.choose(names, ages, phase.text)
                    budget = policy.budget(names, plan) if 0 < plan <= DEPTH else None
                step, probs = self._step(phase, names, ages, plan, drafted, budget)
                pending.append((step, probs))
                seconds += step.seconds
                tokens += sum(len(each) + 1 for each in step.accepted)
        return tokens / seconds

    def _step(
        self, phase, names, ages, plan, drafted, budget
    ) -> tuple[Step, np.ndarray]:
        longest, confidence = chains(self.drafter, phase.text)
        at = [(self.rows[name] + self.ages[name]) % len(longest) for name in names]
        probs, n = confidence[at], len(names)
        if plan > DEPTH:
            found = outcomes(self.drafter, phase.text, plan)
            accepted = [found[row] for row in at]
            verified = [plan] * n
            num_best = [min(int(longest[row]), len(found[row])) for row in at]
        else:
            verified = [plan] * n
            if budget is not None:
                reached = probs[:, :plan].cumprod(axis=1)
                least = np.sort(reached, axis=None)[-max(budget, 1)]
                verified = (reached >= least).sum(axis=1).tolist()
            num_best = [
                min(int(longest[r]), v) for r, v in zip(at, verified, strict=True)
            ]
            accepted = [[*range(1, number + 1)] for number in num_best]
        if budget is None:
            seconds = self.times.seconds(n, plan)
        else:
            seconds = self.times.trimmed(n, plan, budget / n)
        seconds *= self._noise() * (1 + SWITCH * (drafted != plan))
        for name, nodes in zip(names, accepted, strict=True):
            self.ages[name] += len(nodes) + 1
        counts = verified, accepted, num_best
        return Step(
            plan, budget, drafted, seconds, names, ages, *counts, phase.text
        ), probs


class Auto:
    """The engine's chooser, with what the scheduler does around it."""

    def __init__(self, times: Times, measured: dict, trimmed: dict | None, trees: dict):
        from vllm.v1.spec_decode.auto import chooser
        from vllm.v1.spec_decode.auto.verify import PartialSteps
        from vllm.v1.spec_decode.dynamic.graph_sizes import trimmed_rows

        self.module, self.depths = chooser, trees
        partial = trimmed and PartialSteps(trimmed, 64, trimmed_rows)
        self.chooser = chooser.Chooser(DEPTH, measured, trees, 256, partial or None)
        self.load: Any = None
        self.batch: Any = None
        self.elapsed, self.steps, self.last = 0, 0, None

    def _load(self, names: list[str], ages: list[int], text: str) -> Any:
        from vllm.v1.spec_decode.auto.acceptance import NUM_KINDS, kind_of

        n, shares = len(names), [0.0] * NUM_KINDS
        for age in ages:
            shares[kind_of(TEMPERATURES[text], age)] += 1 / n
        age = sum(ages) / n
        return self.module.Load(n, n, 256.0 + age, age=age, shares=tuple(shares))

    def choose(self, names: list[str], ages: list[int], text: str) -> int:
        self.elapsed += 1
        batch, choice = (len(names), names[-1]), self.chooser.choice
        if choice and batch == self.batch and self.elapsed < HELD:
            return choice.plan
        elapsed, self.elapsed = self.elapsed, 0
        self.load = self._load(names, ages, text)
        chosen = self.chooser.choose(self.load, elapsed)
        self.batch = batch if self.chooser.may_hold else None
        return chosen

    def budget(self, names: list[str], num_drafts: int) -> int | None:
        if self.chooser.verifier is None or len(names) < 64:
            return None
        self.chooser.verifier.count(True)
        return self.chooser.verify(len(names), num_drafts, self.load)

    def observe(self, step: Step, probs: np.ndarray) -> None:
        from vllm.v1.spec_decode.auto.acceptance import Verified, kind_of

        kind = step.plan, step.drafted, len(step.names), step.budget is not None
        if step.plan == step.drafted and kind == self.last:
            load = len(step.names), 256.0 + sum(step.ages) / len(step.ages)
            self.chooser.observe_seconds(*load, step.plan, step.seconds, step.budget)
        self.last, self.steps = kind, self.steps + 1
        is_report = self.steps % 4 == 0 and 0 < step.plan <= DEPTH
        if is_report and self.chooser.verifier and len(step.names) >= 64:
            tokens = np.array([len(each) + 1 for each in step.accepted])
            drafts = np.full(len(tokens), step.plan)
            self.chooser.verifier.report(probs, tokens, drafts)
        if not step.plan or (step.budget is not None and not is_report):
            return
        for i, name in enumerate(step.names[:32]):
            verified, accepted = step.verified[i], step.accepted[i]
            more = ()
            if step.budget is not None and len(accepted) == verified:
                more = tuple(probs[i, verified : min(len(accepted) + 2, step.plan)])
            if not verified and not more:
                continue
            drafts = Verified(
                verified, accepted, step.num_best[i], more, step.budget is not None
            )
            kind = kind_of(TEMPERATURES[step.text], step.ages[i])
            self.chooser.observe(drafts, kind, name)


def depths_of(drafter: str, trees: list[int]) -> dict[int, int]:
    """Trees of drafters with several passes are less deep if they are small."""
    is_one_pass = drafter in ("pard", "peagle")
    return {n: DEPTH if is_one_pass else min(DEPTH, (n + 1) // 4) for n in trees}


def replay(drafter: str, phases: list[Phase], seeds: int, make: Any) -> tuple:
    """Tokens per second of "auto", and of the best fixed plan of each phase."""
    times, found = Times(drafter), []
    trees = depths_of(drafter, [p for p in times.plans if p > DEPTH])
    for seed in range(seeds):
        table, curves = times.measured(np.random.default_rng(100 + seed))
        policy = make(
            times, table, curves if drafter in ("pard", "peagle") else None, trees
        )
        found.append(Engine(drafter, times, seed).run(phases, policy))
    return float(np.mean(found)), best_fixed(drafter, tuple(phases))


@cache
def best_fixed(drafter: str, phases: tuple[Phase, ...]) -> float:
    times, tokens = Times(drafter), 0.0
    best: dict[tuple[int, str], float] = {}
    for phase in phases:
        key = phase.num_reqs, phase.text
        if key not in best:
            best[key] = max(
                Engine(drafter, times, 0).run([phase._replace(seconds=4.0)], plan)
                for plan in times.plans
                if plan <= DEPTH or phase.num_reqs * (plan + 1) <= 256
            )
        tokens += best[key] * phase.seconds
    return tokens / sum(phase.seconds for phase in phases)


def cases() -> Iterator[tuple[str, list[Phase]]]:
    for drafter in ("peagle", "eagle3", "pard", "draft"):
        largest = max(n for n, row in recorded_ms(drafter).items() if len(row) > 2)
        for phases in STEADY + CHANGING:
            if max(phase.num_reqs for phase in phases) <= largest:
                yield drafter, phases


def described(phases: list[Phase]) -> str:
    if len(phases) == 1:
        return f"{phases[0].num_reqs} requests, {phases[0].text}"
    texts = sorted({phase.text for phase in phases})
    return f"changing load, {'/'.join(texts)}"


def main(make: Any = Auto) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--json", type=Path, help="writes the table")
    args = parser.parse_args()
    rows = []
    for drafter, phases in cases():
        found, best = replay(drafter, phases, args.seeds, make)
        rows.append([drafter, described(phases), found, best, found / best])
        numbers = f"{found:9.0f} {best:9.0f} {found / best:.3f}"
        print(f"{drafter:8} {described(phases):36} {numbers}", flush=True)
    shares = np.array([row[-1] for row in rows])
    print(
        f"geometric mean {np.exp(np.log(shares).mean()):.4f}, least {shares.min():.3f}"
    )
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
