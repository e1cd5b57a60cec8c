# SPDX-License-Identifier: Apache-2.0
"""Which engines to start, and how much each of them drafts.

An engine with "auto" has CUDA graphs for all lengths and trees that it chooses from,
and can be told to use one of them, so it measures "auto" and fixed ones in turns. Other
lengths and trees get an engine of their own.
"""

from argparse import Namespace
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from vllm.config import SpeculativeConfig, VllmConfig
from vllm.config.drafter.length import MAX_TREE_ROWS, chosen_lengths, lengths_vary

NONE, NONE_V2 = "no speculation", "no speculation, Runner V2"
AUTO = "auto"
HOW_MUCH = (
    "num_speculative_tokens",
    "num_speculative_tokens_per_batch_size",
    "draft_tree",
)
# Measured by default, as far as an engine chooses from them.
CHAINS, TREES = (1, 3, 5), (15, 31, 63)
QUICK_CHAINS, QUICK_TREES = (), (31,)
CHECK, MEASURE = "checking output", "measuring"


@dataclass(frozen=True)
class Setting:
    """How much is drafted.

    Attributes:
        name: such as "auto", "K=3" or "tree of 31".
        spec: the speculative config that drafts so; None: no speculation.
        told: draft length that the engine is told to use; None: it is not told.
        depth: K, the most draft tokens that can be accepted.
    """

    name: str = ""
    spec: dict[str, Any] | None = None
    told: int | None = None
    depth: int = 0

    def is_measured_at(self, num_requests: int) -> bool:
        """False if the engine would have no CUDA graphs for so large a tree."""
        if self.told is None or self.told <= self.depth:
            return True
        return num_requests * (self.told + 1) <= MAX_TREE_ROWS


@dataclass(frozen=True)
class EnginePlan:
    """One engine, and what is measured on it.

    Attributes:
        drafter: its name in the table.
        spec: the engine's speculative config.
        is_lossless: whether greedy output has to be the target's own.
        is_seeded: whether output of requests with a seed has to be, too.
        env: environment variables of its process, beside the existing ones.
        is_beside: whether it keeps running, and takes turns with each drafter.
        repeats: rounds of each point; None: as many as the flags say.
    """

    drafter: str
    spec: dict[str, Any] | None
    settings: tuple[Setting, ...]
    is_lossless: bool = True
    is_seeded: bool = True
    env: dict[str, str] | None = None
    is_beside: bool = False
    repeats: int | None = None

    @property
    def is_reference(self) -> bool:
        """Whether the other engines' output has to be like its output."""
        return self.spec is None and self.is_seeded


class Task(NamedTuple):
    """One round of requests on an engine.

    Attributes:
        load: concurrency.
        is_seeded: whether requests are sampled with a seed; else they are greedy.
    """

    kind: str
    setting: Setting
    load: int
    is_seeded: bool = False


def name_drafters(specs: Sequence[dict[str, Any]]) -> list[str]:
    """A name for each drafter, by its folder or method; equal names are numbered.

    Not those of one drafter with different draft lengths or trees, which tell them
    apart.
    """
    models = [str(spec.get("model") or spec.get("method", "?")) for spec in specs]
    names = [Path(model).name for model in models]

    def is_told_apart(name: str) -> bool:
        same = [at for at, other in enumerate(names) if other == name]
        told = {_told(specs[at]) for at in same}
        return len({models[at] for at in same}) == 1 and len(told) == len(same)

    return [
        name if is_told_apart(name) else f"{name} ({names[:at].count(name) + 1})"
        for at, name in enumerate(names)
    ]


def _told(spec: dict[str, Any]) -> str:
    """The draft length, schedule or tree that a config sets, if any."""
    return next((f"{key}={spec[key]}" for key in HOW_MUCH if spec.get(key)), "")


def plan_engines(
    drafters: Sequence[dict[str, Any]],
    args: Namespace,
    resolve: Callable[[dict[str, Any] | None], VllmConfig],
) -> list[EnginePlan]:
    """No speculation first, then each drafter, and then no speculation again, except
    with `--quick`, and where it takes turns with the drafters.

    If vLLM runs on Runner V1 without speculation and on V2 with a drafter, as on a CPU,
    the expected output is from V2: with a seed the two sample different tokens. If
    there are turns, that engine is used for nothing else.

    Args:
        drafters: speculative configs. One that says how much to draft is measured as
            it is, others with "auto" and fixed lengths and trees.
        args: the flags.
        resolve: makes the engine's config with a speculative config.

    Raises:
        ValueError: from `resolve`, which is called for every engine to be started.
    """
    # In turns it is measured with every drafter.
    turns = {"is_beside": True, "repeats": 0} if args.in_turns else {}
    plans = [EnginePlan(NONE, None, (Setting(),), **turns)]
    for name, spec in zip(name_drafters(drafters), drafters, strict=True):
        resolved = resolve(spec).speculative_config
        is_lossless = resolved.rejection_sample_method != "synthetic"
        # vLLM's own speculators sample by random numbers that depend on the drafts.
        promises = is_lossless, is_lossless and resolved.drafter.is_unified
        together, alone = _settings(spec, args, resolved)
        groups = [together] * bool(together) + [(setting,) for setting in alone]
        for settings in groups:
            resolve(settings[0].spec)
            plans.append(EnginePlan(name, settings[0].spec, settings, *promises))
    if any(p.is_seeded for p in plans[1:]) and not resolve(None).use_v2_model_runner:
        env = {"VLLM_USE_V2_MODEL_RUNNER": "1"}
        plans[0] = replace(plans[0], is_seeded=False)
        repeats = 0 if args.in_turns else None
        on_v2 = EnginePlan(NONE_V2, None, (Setting(),), env=env, repeats=repeats)
        plans.insert(0, on_v2)
    if not (args.quick or args.in_turns):
        plans.append(EnginePlan(NONE, None, (Setting("again"),), is_seeded=False))
    return plans


def _settings(
    spec: dict[str, Any], args: Namespace, resolved: SpeculativeConfig
) -> tuple[tuple[Setting, ...], list[Setting]]:
    """A drafter's settings: those that share an engine, and those with their own."""
    depth = resolved.drafter.num_speculative_tokens
    is_auto = lengths_vary(resolved)
    if told := _told(spec):
        return (Setting(AUTO if is_auto else told, spec, None, depth),), []
    chosen = chosen_lengths(resolved) if is_auto else []
    chains, trees = args.num_speculative_tokens, args.draft_tree
    if chains is None and is_auto and args.auto_alone:
        chains = []
    if chains is None:
        usual = QUICK_CHAINS if args.quick else CHAINS
        chains = sorted({*(k for k in usual if k < depth and k in chosen), depth})
    if trees is None:
        usual = QUICK_TREES if args.quick else TREES
        trees = [n for n in usual if n > depth and n in chosen]
    fixed = [_chain(spec, k) for k in chains] + [_tree(spec, n, depth) for n in trees]
    shared = [s for s in fixed if s.told in chosen and s.depth <= depth]
    together = (Setting(AUTO, spec, None, depth), *shared) if is_auto else ()
    return together, [replace(s, told=None) for s in fixed if s not in shared]


def _chain(spec: dict[str, Any], k: int) -> Setting:
    return Setting(f"K={k}", {**spec, "num_speculative_tokens": k}, k, k)


def _tree(spec: dict[str, Any], nodes: int, depth: int) -> Setting:
    more = {"num_speculative_tokens": depth, "draft_tree": nodes}
    return Setting(f"tree of {nodes}", {**spec, **more}, nodes, depth)


def plan_tasks(plan: EnginePlan, loads: Collection[int], repeats: int) -> list[Task]:
    """Rounds of one engine, in order: settings take turns at each load.

    The highest load is first: there "auto" learns what is accepted in the fewest steps,
    and a server has learned it, too. The first two rounds without speculation give the
    expected output. With a drafter, sampled requests are last, since "auto" learns from
    them, and measured requests are greedy.
    """
    most = max(loads)
    checks = [Task(CHECK, s, most, True) for s in plan.settings if plan.is_seeded]
    if plan.is_reference:
        checks.insert(0, Task(CHECK, plan.settings[0], most))
    repeats = repeats if plan.repeats is None else plan.repeats
    rounds: list[Task] = []
    for load in sorted(loads, reverse=True):
        here = [s for s in plan.settings if s.is_measured_at(load)]
        rounds += [Task(MEASURE, setting, load) for setting in here] * repeats
    return [*checks, *rounds] if plan.is_reference else [*rounds, *checks]
