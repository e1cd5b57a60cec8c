# SPDX-License-Identifier: Apache-2.0
"""What is measured: drafters, and how much each of them drafts.

An engine with "auto" has CUDA graphs for all lengths and trees that it chooses from, so
it measures "auto" and fixed ones in turns. Others get an engine of their own.
"""

from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from vllm.benchmarks.drafters.compare import Comparison
from vllm.benchmarks.drafters.engine import Round
from vllm.config import SpeculativeConfig, VllmConfig
from vllm.config.drafter.length import MAX_TREE_ROWS, chosen_lengths, lengths_vary

NONE, AUTO = "no speculation", "auto"
HOW_MUCH = (
    "num_speculative_tokens",
    "num_speculative_tokens_per_batch_size",
    "draft_tree",
)
Spec = dict[str, Any]  # a speculative config
Rounds = dict[int, list[Round]]  # by concurrency


@dataclass
class Side:
    """A drafter that drafts so much, and what was measured of it.

    Attributes:
        setting: how much, such as "auto", "K=3" or "tree of 31".
        spec: the speculative config that drafts so; None: no speculation.
        num_drafts: draft length that is set on an engine with "auto"; None: as it is.
        depth: K, the most draft tokens that can be accepted.
        is_lossless: whether output has to be the target's.
        engine: see `Engine.describe`.
        beside: rounds without speculation that took turns with these, if any.
    """

    drafter: str
    setting: str = ""
    spec: Spec | None = None
    num_drafts: int | None = None
    depth: int = 0
    is_lossless: bool = True
    engine: dict[str, Any] = field(default_factory=dict)
    rounds: Rounds = field(default_factory=dict)
    beside: Rounds = field(default_factory=dict)
    comparison: Comparison = field(default_factory=Comparison)

    @property
    def name(self) -> str:
        return f"{self.drafter} {self.setting}".rstrip()

    def is_measured_at(self, num_requests: int) -> bool:
        """False if the engine would have no CUDA graphs for so large a tree."""
        if self.num_drafts is None or self.num_drafts <= self.depth:
            return True
        return num_requests * (self.num_drafts + 1) <= MAX_TREE_ROWS


def speed(rounds: list[Round] | None) -> float | None:
    """Median tokens per second; None without any round."""
    return median(each.tokens_per_s for each in rounds) if rounds else None


def fixed_setting(spec: Spec) -> str:
    """The draft length, schedule or tree that a config sets, if any."""
    return next((f"{key}={spec[key]}" for key in HOW_MUCH if spec.get(key)), "")


def name_drafters(specs: Sequence[Spec]) -> list[str]:
    """A name for each drafter, by its folder or method; those that nothing tells apart
    are numbered."""
    models = [Path(str(spec.get("model") or spec.get("method", "?"))) for spec in specs]
    keys = [
        (each.name, fixed_setting(s)) for each, s in zip(models, specs, strict=True)
    ]
    many = {key for key, count in Counter(keys).items() if count > 1}
    return [
        f"{key[0]} ({keys[:at].count(key) + 1})" if key in many else key[0]
        for at, key in enumerate(keys)
    ]


def plan_engines(
    drafters: Sequence[Spec],
    args: Namespace,
    resolve: Callable[[Spec | None], VllmConfig],
) -> list[list[Side]]:
    """The sides by engine. No speculation is first, and again last except with
    `--quick`.

    Args:
        drafters: speculative configs. One that says how much to draft is measured as
            it is, others with "auto", if they can, and the lengths of the flags.
        args: the flags.
        resolve: makes the engine's config with a speculative config.

    Raises:
        ValueError: from `resolve`, which is called for every engine to be started.
    """
    engines = [[Side(NONE)]]
    for name, spec in zip(name_drafters(drafters), drafters, strict=True):
        resolved = resolve(spec).speculative_config
        for sides in drafter_engines(name, spec, args, resolved):
            resolve(sides[0].spec)
            for side in sides:
                side.is_lossless = resolved.rejection_sample_method != "synthetic"
            engines.append(sides)
    return engines if args.quick else [*engines, [Side(NONE, "again")]]


def drafter_engines(
    name: str, spec: Spec, args: Namespace, resolved: SpeculativeConfig
) -> list[list[Side]]:
    """A drafter's sides by engine: by default "auto", else the longest chain."""
    depth, is_auto = resolved.drafter.num_speculative_tokens, lengths_vary(resolved)
    together = [Side(name, AUTO, spec, None, depth)] * is_auto
    if fixed := fixed_setting(spec):
        return [together or [Side(name, fixed, spec, None, depth)]]
    chosen, alone = chosen_lengths(resolved) if is_auto else [], []
    for k in args.num_speculative_tokens or ([] if is_auto else [depth]):
        length = {"num_speculative_tokens": k}
        alone.append(Side(name, f"K={k}", spec | length, k, k))
    for nodes in args.draft_tree or ():
        size = {"num_speculative_tokens": depth, "draft_tree": nodes}
        alone.append(Side(name, f"tree of {nodes}", spec | size, nodes, depth))
    shared = [s for s in alone if s.num_drafts in chosen and s.depth <= depth]
    others = [[replace(s, num_drafts=None)] for s in alone if s not in shared]
    return [together + shared] * is_auto + others
