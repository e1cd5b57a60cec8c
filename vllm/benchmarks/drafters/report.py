# SPDX-License-Identifier: Apache-2.0
"""Reports a measurement: table, plot, verdict, and a command to serve with."""

import json
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from math import prod
from pathlib import Path
from typing import Any

from vllm.benchmarks.drafters.compare import (
    LARGEST_TOLERANCE,
    Comparison,
    Difference,
)
from vllm.benchmarks.drafters.measure import Found, Measurement, fastest
from vllm.benchmarks.drafters.plan import AUTO

GIB = 1 << 30
BAR_WIDTH = 40
SHOWN_DIFFERENCES = 3
# Settings that differ by less are as fast: "auto" is best then, as it adapts to load.
SAME_SPEED = 0.01
# The speed without speculation may vary by less than this factor.
UNSTEADY = 1.15
LEAST_DRAFTED = 0.05  # of all drafts, to show how often a position is accepted
HEAD = (
    "requests",
    "drafter",
    "drafts",
    "acceptance length",
    "accepted where drafted",
    "tokens/s",
    "ratio",
    "TPOT ms",
    "start s",
    "memory GiB",
)


class Report:
    """The report of a finished measurement.

    Args:
        model: the target, as `vllm serve` takes it.
        flags: further flags of `vllm serve`.
    """

    def __init__(self, measured: Measurement, model: str, flags: Sequence[str]):
        self.measured, self.model, self.flags = measured, model, flags
        self.loads = list(measured.job.loads)
        self.found = measured.found
        self.bases = [found for found in self.found if not found.is_drafting]
        # At the start and at the end: engines as vLLM runs them without a drafter.
        self.ends = [b for b in self.bases if b.plan.env is None] or self.bases
        self.compared = [f for f in self.found if f.plan.spec and f.plan.is_lossless]

    @property
    def has_drafted(self) -> bool:
        return any(found.is_drafting for found in self.found)

    @property
    def is_lossless(self) -> bool:
        return not any(found.comparison.errors for found in self.compared)

    def ratio(self, found: Found, load: int) -> float | None:
        """Tokens per second over those without speculation; None: not measured.

        The latter are those that took turns with these, or the fastest of all if there
        were no turns, since other load may have slowed the rest down.
        """
        if (drafted := found.round(load)) is None:
            return None
        every = [round for base in self.bases for round in base.rounds.get(load, ())]
        base = fastest(found.beside.get(load, every))
        return drafted.tokens_per_s / base.tokens_per_s

    def unsteady(self) -> str:
        """A warning if the speed without speculation varied; else empty."""
        most, drafted = 1.0, [found for found in self.found if found.beside]
        for load in self.loads:
            times = [end.rounds.get(load) for end in self.ends]
            times += [found.beside.get(load) for found in drafted]
            speeds = [fastest(rounds).tokens_per_s for rounds in times if rounds]
            most = max(most, max(speeds) / min(speeds))
        if most < UNSTEADY:
            return ""
        what = (
            f"\nUnsteady: no speculation differs by {most:.1f}× from begin to end. "
            "Something else ran on this machine"
        )
        if drafted:
            return f"{what}: compare ratios, each over its own turns, not tokens/s."
        return f"{what}: run it again alone."

    def rows(self) -> Iterator[dict[str, Any]]:
        """A row for each load and setting, as --json has them."""
        for load in self.loads:
            for found in self.found:
                if load in found.rounds:
                    yield self._row(found, load)

    def _row(self, found: Found, load: int) -> dict[str, Any]:
        best, depth = found.round(load), found.setting.depth
        counts = zip(best.accepted_at[:depth], best.drafted, strict=False)
        shares = [accepted / max(drafted, 1) for accepted, drafted in counts]
        drafted = [count / max(best.drafts, 1) for count in best.drafted[:depth]]
        return {
            "requests": load,
            "drafter": found.plan.drafter,
            "drafts": found.setting.name,
            "speculative_config": found.setting.spec,
            "acceptance_length": best.acceptance_length,
            "drafted_by_position": drafted,
            "acceptance_by_position": shares,
            "tokens_per_s": best.tokens_per_s,
            "ratio": self.ratio(found, load),
            "tpot_s": best.tpot_s,
            "start_s": found.engine["start_s"],
            "memory_bytes": found.engine["memory_bytes"],
        }

    def table(self) -> str:
        """The rows as a Markdown table."""
        lines = [HEAD, *map(_cells, self.rows())]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        lines.insert(1, tuple("-" * width for width in widths))
        return "\n".join(
            "| " + " | ".join(map(str.ljust, line, widths)) + " |" for line in lines
        )

    def plot(self) -> str:
        """Tokens per second, and bars of their ratios to no speculation."""
        names = [found.name for found in self.found if found.rounds]
        width = max(map(len, names), default=0)
        lines = []
        for load in self.loads:
            here = [found for found in self.found if load in found.rounds]
            ratios = [self.ratio(found, load) for found in here]
            lines.append(f"tokens/s, {load} at a time; bars: over no speculation")
            for found, ratio in zip(here, ratios, strict=True):
                bar = "█" * max(1, round(BAR_WIDTH * ratio / max(ratios)))
                said = f"{found.round(load).tokens_per_s:.0f}"
                said += f" ({ratio:.2f}×)" * found.is_drafting
                lines.append(f"  {found.name:{width}}  {bar} {said}")
        return "\n".join(lines)

    def verdict(self) -> str:
        """Whether output is the target's own, and where it differs."""
        total = sum((f.comparison for f in self.compared), Comparison())
        what = total.describe() if self.compared else "none compared"
        lines = [f"Answers beside those of no speculation: {what}"]
        for found in self.found:
            comparison, notes = found.comparison, []
            if not found.plan.is_lossless:
                notes.append("not compared: its acceptance is made up")
            elif comparison.ties or comparison.errors:
                notes.append(comparison.describe())
            if found in self.compared and not found.plan.is_seeded:
                notes.append("with seeds not compared: vLLM's own speculator drafts")
            if notes:
                lines.append(f"  {found.name}: {'; '.join(notes)}")
            if found.plan.spec is not None:
                lines += map(self._show, comparison.errors[:SHOWN_DIFFERENCES])
        near = f"two tokens whose logprobs are within {self.measured.within:.2g}"
        if not self.compared:
            lines.append("Nothing is known of losslessness.")
        elif self.is_lossless and self.measured.within > LARGEST_TOLERANCE:
            lines.append(
                "Nothing is known of losslessness: no speculation differs from itself "
                f"by {self.measured.within:.2g} nats."
            )
        elif self.is_lossless:
            lines.append(f"Lossless: no difference, but for ties of {near}.")
        else:
            lines.append(f"NOT LOSSLESS: differences above are no ties of {near}.")
        return "\n".join(lines)

    def _show(self, difference: Difference) -> str:
        return (
            f"    prompt {difference.request}, token {difference.at}: after "
            f"{self._text(difference.before)} no speculation has "
            f"{self._token(difference.expected)}, this has "
            f"{self._token(difference.found)}, {difference.gap:.2f} nats less likely"
        )

    def _token(self, token: int | None) -> str:
        return "its end" if token is None else self._text([token])

    def _text(self, tokens: list[int]) -> str:
        tokenizer = self.measured.job.tokenizer
        return repr(tokenizer.decode(tokens) if tokenizer else tokens)

    def best(self) -> Found:
        """The fastest over all loads, by the geometric mean of its ratios."""
        sound = [f for f in self.found if f.is_drafting and not f.comparison.errors]
        sound.insert(0, self.ends[0])
        most = max(map(self._gain, sound))
        near = [f for f in sound if self._gain(f) >= most * (1 - SAME_SPEED)]
        autos = [found for found in near if found.setting.name == AUTO]
        return max(autos or near, key=self._gain)

    def _gain(self, found: Found) -> float:
        if not found.is_drafting:
            return 1.0
        ratios = [self.ratio(found, load) for load in self.loads]
        if None in ratios:
            return 0.0
        return prod(ratios) ** (1 / len(ratios))

    def command(self) -> str:
        """The command that serves with the best setting."""
        words = ["vllm", "serve", self.model, *self.flags]
        if (spec := self.best().setting.spec) is not None:
            words += ["--speculative-config", json.dumps(spec)]
        return shlex.join(words)

    def advice(self) -> str:
        if not self.has_drafted:
            return "Nothing is known of any drafter: none could be measured."
        best = self.best()
        if best.plan.spec is None:
            gain = "no drafter gains over no speculation"
        else:
            gains = [f"{self.ratio(best, n):.2f}× at {n}" for n in self.loads]
            gain = f"{', '.join(gains)} at a time, over no speculation"
        return f"Best: {gain}\n{self.command()}{self.unsteady()}"

    def as_json(self) -> dict[str, Any]:
        found = {
            "model": self.model,
            "rows": list(self.rows()),
            "failed": self.measured.failed,
            "is_lossless": self.is_lossless,
            "tie_within": self.measured.within,
            "output": {found.name: asdict(found.comparison) for found in self.compared},
        }
        if self.has_drafted:
            found["best"] = {"name": self.best().name, "command": self.command()}
        return found


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    def said(value: float | None, digits: int = 2, scale: float = 1.0) -> str:
        return "" if value is None else f"{value * scale:.{digits}f}"

    by_position = zip(
        row["acceptance_by_position"], row["drafted_by_position"], strict=True
    )
    # "auto" seldom drafts the last ones, if at all.
    shares = [
        said(share).lstrip("0")
        for share, drafted in by_position
        if drafted >= LEAST_DRAFTED
    ]
    return (
        str(row["requests"]),
        row["drafter"],
        row["drafts"],
        said(row["acceptance_length"]),
        " ".join(shares),
        said(row["tokens_per_s"], 1),
        said(row["ratio"]) if row["speculative_config"] else "",
        said(row["tpot_s"], 2, 1e3),
        said(row["start_s"], 0),
        said(row["memory_bytes"], 2, 1 / GIB),
    )


def draw(report: Report, file: Path) -> None:
    """Writes a picture of tokens per second over no speculation, by load."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.set_prop_cycle(color=colormaps["tab20"].colors)
    for found in filter(lambda found: found.is_drafting, report.found):
        loads = [load for load in report.loads if load in found.rounds]
        ratios = [report.ratio(found, load) for load in loads]
        axes.plot(loads, ratios, marker="o", label=found.name)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.set_xticks(report.loads, map(str, report.loads))
    axes.set(xlabel="requests at a time", ylabel="tokens/s over no speculation")
    axes.set_title(report.model)
    figure.legend(loc="outside right upper", frameon=False)
    figure.savefig(file)
