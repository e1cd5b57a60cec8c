# SPDX-License-Identifier: Apache-2.0
"""Which engines to start, and how much each of them drafts.

Where an engine chooses how much to draft, it has CUDA graphs of all that it chooses
from, and can be told one of them: one engine then measures "auto" and fixed lengths and
trees in turns. What it does not choose from has an engine of its own.
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
# Measured unless flags name others, of those that an engine chooses from.
CHAINS, TREES = (1, 3, 5), (15, 31, 63)
QUICK_CHAINS, QUICK_TREES = (), (31,)
CHECK, MEASURE = "checking output", "measuring"


@dataclass(frozen=True)
class Setting:
    """How much is drafted.

    Attributes:
        name: as "auto", "K=3" or "tree of 31".
        spec: the speculative config that drafts so; None: no speculation.
        told: drafts of each request that the engine is told; None: it is not told.
        depth: K, the most drafts that can be accepted.
    """

    name: str = ""
    spec: dict[str, Any] | None = None
    told: int | None = None
    depth: int = 0

    def is_measured_at(self, num_requests: int) -> bool:
        """Not where an engine that is told so many drafts lacks graphs for them."""
        if self.told is None or self.told <= self.depth:
            return True
        return num_requests * (self.told + 1) <= MAX_TREE_ROWS


@dataclass(frozen=True)
class EnginePlan:
    """One engine, and what is measured on it.

    Attributes:
        drafter: its name in the table.
        spec: the engine's speculative config.
        is_lossless: whether greedy output is to be the target's own.
        is_seeded: whether output of requests with a seed is, too.
        env: of the engine's process, beside what there is.
        is_beside: whether it is kept, and measured in turns with each drafter.
        repeats: rounds of each point; None: as many as are asked for.
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
        """Whether its output is what that of others has to be."""
        return self.spec is None and self.is_seeded


class Task(NamedTuple):
    """One round of requests on an engine.

    Attributes:
        load: requests at a time.
        is_seeded: whether they are drawn; else they are greedy.
    """

    kind: str
    setting: Setting
    load: int
    is_seeded: bool = False


def name_drafters(specs: Sequence[dict[str, Any]]) -> list[str]:
    """A name for each, by its folder or method; equal ones are numbered.

    Not where they are one drafter that is told to draft differently: settings say so.
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
    """What a config says of how much to draft, if anything."""
    return next((f"{key}={spec[key]}" for key in HOW_MUCH if spec.get(key)), "")


def plan_engines(
    drafters: Sequence[dict[str, Any]],
    args: Namespace,
    resolve: Callable[[dict[str, Any] | None], VllmConfig],
) -> list[EnginePlan]:
    """No speculation first, then each drafter, and no speculation again; but if it is
    measured in turns with drafters, not again.

    Where vLLM runs no speculation on Runner V1 and a drafter on V2, as on a CPU, what
    output has to be is said on V2: for a seed the two draw other tokens. If there are
    turns, nothing else is asked of it.

    Args:
        drafters: speculative configs. One that says how much to draft is measured as
            it is, others with "auto" and fixed lengths and trees.
        args: the flags.
        resolve: the engine's config with a speculative config.

    Raises:
        ValueError: what `resolve` raises, for every config that is to be started.
    """
    # In turns it is measured again and again: before that it has only to warm up.
    turns = {"is_beside": True, "repeats": 1} if args.in_turns else {}
    plans = [EnginePlan(NONE, None, (Setting(),), **turns)]
    for name, spec in zip(name_drafters(drafters), drafters, strict=True):
        resolved = resolve(spec).speculative_config
        is_lossless = resolved.rejection_sample_method != "synthetic"
        # Others draw by random numbers that depend on what was drafted.
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
    again = EnginePlan(NONE, None, (Setting("again"),), is_seeded=False)
    return plans if args.in_turns else [*plans, again]


def _settings(
    spec: dict[str, Any], args: Namespace, resolved: SpeculativeConfig
) -> tuple[tuple[Setting, ...], list[Setting]]:
    """Of a drafter: those that share an engine, and those with one of their own."""
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

    Of no speculation the first two tell what output has to be. A drafter draws last:
    "auto" would learn from it, and what is measured is greedy.
    """
    most = max(loads)
    checks = [Task(CHECK, s, most, True) for s in plan.settings if plan.is_seeded]
    if plan.is_reference:
        checks.insert(0, Task(CHECK, plan.settings[0], most))
    repeats = repeats if plan.repeats is None else plan.repeats
    rounds: list[Task] = []
    for load in loads:
        here = [s for s in plan.settings if s.is_measured_at(load)]
        rounds += [Task(MEASURE, setting, load) for setting in here] * repeats
    return [*checks, *rounds] if plan.is_reference else [*rounds, *checks]
