# SPDX-License-Identifier: Apache-2.0
"""What is measured: drafters, and how much each of them drafts."""

from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from vllm.benchmarks.drafters.compare import Comparison
from vllm.benchmarks.drafters.engine import Round
from vllm.config import SpeculativeConfig, VllmConfig
from vllm.config.drafter.length import lengths_vary

NONE, AUTO = "no speculation", "auto"
LENGTH, TREE = "num_speculative_tokens", "draft_tree"
SCHEDULE = "num_speculative_tokens_per_batch_size"
Spec = dict[str, Any]  # a speculative config
Rounds = dict[int, list[Round]]  # by concurrency


@dataclass
class Side:
    """A drafter that drafts so much, on an engine of its own, and what was measured.

    Attributes:
        setting: how much, such as "auto", "K=3" or "tree of 31".
        spec: the speculative config that drafts so; None: no speculation.
        depth: K, the most draft tokens that can be accepted.
        is_lossless: whether output has to be the target's.
        engine: see `Engine.describe`; empty until it has started.
    """

    drafter: str
    setting: str = ""
    spec: Spec | None = None
    depth: int = 0
    is_lossless: bool = True
    engine: dict[str, Any] = field(default_factory=dict)
    rounds: Rounds = field(default_factory=dict)
    comparison: Comparison = field(default_factory=Comparison)

    @property
    def name(self) -> str:
        return f"{self.drafter} {self.setting}".rstrip()


def speed(rounds: list[Round]) -> float:
    """Median tokens per second."""
    return median(each.tokens_per_s for each in rounds)


def plan_sides(
    drafters: Sequence[Spec],
    args: Namespace,
    resolve: Callable[[Spec | None], VllmConfig],
) -> list[Side]:
    """No speculation first, and again last, which shows how steady the machine is.

    Args:
        drafters: speculative configs. One that says how much to draft is measured as
            it is, others as they are, and with the lengths and trees of the flags.
        args: the flags.
        resolve: makes the engine's config with a speculative config.

    Raises:
        ValueError: from `resolve`, which is called for every engine to be started.
    """
    sides = [Side(NONE)]
    for spec in drafters:
        specs = [spec]
        if not any(spec.get(key) for key in (LENGTH, TREE, SCHEDULE)):
            specs += [spec | {LENGTH: k} for k in args.num_speculative_tokens or ()]
            specs += [spec | {TREE: nodes} for nodes in args.draft_tree or ()]
        for each in specs:
            resolved = resolve(each).speculative_config
            name = Path(str(spec.get("model") or spec.get("method"))).name
            depth = resolved.drafter.num_speculative_tokens
            is_lossless = resolved.rejection_sample_method != "synthetic"
            setting = name_setting(each, resolved)
            sides.append(Side(name, setting, each, depth, is_lossless))
    names = [side.name for side in sides]
    for at, side in enumerate(sides):
        if names.count(names[at]) > 1:  # folders of the same name
            side.drafter += f" ({names[: at + 1].count(names[at])})"
    return [*sides, Side(NONE, "again")]


def name_setting(spec: Spec, resolved: SpeculativeConfig) -> str:
    if lengths_vary(resolved):
        return AUTO
    if spec.get(SCHEDULE):
        return "schedule"
    if nodes := spec.get(TREE):
        return f"tree of {nodes}"
    return f"K={resolved.drafter.num_speculative_tokens}"
