# SPDX-License-Identifier: Apache-2.0
"""Reports a measurement: table, verdict, and a command to serve with."""

import json
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import chain, zip_longest
from math import prod
from statistics import median
from typing import Any

from vllm.benchmarks.drafters.compare import LARGEST_TOLERANCE
from vllm.benchmarks.drafters.engine import Round
from vllm.benchmarks.drafters.measure import Measurement
from vllm.benchmarks.drafters.plan import AUTO, Side, speed

SHOWN_DIFFERENCES = 3
# Settings that differ by less are as fast: "auto" is best then, as it adapts to load.
SAME_SPEED = 0.01
# The speed without speculation may vary by less than the first factor; above the second
# no setting is called the best.
UNSTEADY, USELESS = 1.15, 1.5
LEAST_DRAFTED = 0.05  # of all drafts, to show how often a position is accepted
# Title of a column: key of a row, factor, digits.
NUMBERS = {
    "acceptance length": ("acceptance_length", 1, 2),
    "tokens/s": ("tokens_per_s", 1, 1),
    "ratio": ("ratio", 1, 2),
    "TPOT ms": ("tpot_s", 1e3, 2),
    "start s": ("start_s", 1, 0),
    "memory GiB": ("memory_bytes", 1 / (1 << 30), 2),
}


class Report:
    """The report of a measurement, which may be going on.

    Args:
        model: the target, as `vllm serve` takes it.
        flags: further flags of `vllm serve`.
    """

    def __init__(self, measured: Measurement, model: str, flags: Sequence[str]):
        self.measured, self.model, self.flags = measured, model, flags
        self.loads = list(measured.loads)

    @property
    def compared(self) -> list[Side]:
        return [s for s in self.measured.sides if s.spec and s.rounds and s.is_lossless]

    @property
    def is_lossless(self) -> bool | None:
        """None: nothing is known."""
        if any(side.comparison.errors for side in self.compared):
            return False
        return bool(self.compared and self.measured.within <= LARGEST_TOLERANCE) or None

    def ratio(self, side: Side, load: int) -> float:
        """Median tokens per second over that without speculation, of the faster run,
        since other load may have slowed the other."""
        return speed(side.rounds[load]) / max(map(speed, self._rounds_of_none(load)))

    def _rounds_of_none(self, load: int) -> list[list[Round]]:
        none = (side.rounds for side in self.measured.sides if not side.spec)
        return [rounds[load] for rounds in none if load in rounds]

    def unsteadiness(self) -> float:
        """By how much the speed of rounds without speculation varied, as a factor."""
        found = [1.0]
        for load in self.loads:
            rounds = chain.from_iterable(self._rounds_of_none(load))
            if speeds := [each.tokens_per_s for each in rounds]:
                found.append(max(speeds) / min(speeds))
        return max(found)

    def rows(self) -> Iterator[dict[str, Any]]:
        """A row for each load and side, as --json has them."""
        for load in self.loads:
            measured = (side for side in self.measured.sides if load in side.rounds)
            yield from (self._row(side, load) for side in measured)

    def _row(self, side: Side, load: int) -> dict[str, Any]:
        def total(name: str) -> list[int]:
            of_rounds = [each.counts.get(name, [0]) for each in side.rounds[load]]
            return [sum(values) for values in zip_longest(*of_rounds, fillvalue=0)]

        (drafts,), (accepted,) = total("drafts"), total("accepted_tokens")
        drafted = total("draft_tokens_per_pos")[: side.depth]
        by_position = zip(total("accepted_tokens_per_pos"), drafted, strict=False)
        return {
            "requests": load,
            "drafter": side.drafter,
            "drafts": side.setting,
            "speculative_config": side.spec,
            "acceptance_length": 1 + accepted / drafts if drafts else None,
            "drafted_by_position": [count / max(drafts, 1) for count in drafted],
            "acceptance_by_position": [n / max(made, 1) for n, made in by_position],
            "tokens_per_s": speed(side.rounds[load]),
            "ratio": self.ratio(side, load),
            "tpot_s": median(each.tpot_s for each in side.rounds[load]),
            "start_s": side.engine["start_s"],
            "memory_bytes": side.engine["memory_bytes"],
        }

    def table(self) -> str:
        """The rows as a Markdown table."""
        head = "requests", "drafter", "drafts", "accepted where drafted", *NUMBERS
        texts = [head, *map(cells, self.rows())]
        widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
        texts.insert(1, ["-" * width for width in widths])
        return "\n".join(
            "| " + " | ".join(map(str.ljust, line, widths)) + " |" for line in texts
        )

    def verdict(self) -> str:
        """Whether output is the target's, and where it differs."""
        lines = ["Answers beside those of no speculation:"]
        for side in self.measured.sides:
            if side.rounds and not side.is_lossless:
                lines.append(f"  {side.name}: not compared: synthetic acceptance")
            elif side.rounds:
                lines.append(f"  {side.name}: {side.comparison}")
            if side.spec is not None:
                lines += map(str, side.comparison.errors[:SHOWN_DIFFERENCES])
        within = self.measured.within
        near = f"ties of two tokens whose logprobs are within {within:.2g}"
        if self.is_lossless is False:
            lines.append(f"NOT LOSSLESS: differences above are no {near}.")
        elif self.is_lossless is None:
            lines.append("Nothing is known of losslessness.")
        else:
            lines.append(f"Lossless: no difference, but for {near}.")
        return "\n".join(lines)

    def best(self) -> Side | None:
        """The fastest over all loads, by the geometric mean of its ratios; None: no
        drafter was measured at each, or the machine was too unsteady to tell."""
        measured = [s for s in self.measured.sides if s.rounds.keys() >= {*self.loads}]
        sides = [s for s in measured if not (s.spec and s.comparison.errors)]
        if not any(s.spec for s in measured) or self.unsteadiness() > USELESS:
            return None
        most = max(map(self._gain, sides))
        near = [s for s in sides if self._gain(s) >= most * (1 - SAME_SPEED)]
        return max(near, key=lambda side: (side.setting == AUTO, self._gain(side)))

    def _gain(self, side: Side) -> float:
        if not side.spec:
            return 1.0
        return prod(self.ratio(side, n) for n in self.loads) ** (1 / len(self.loads))

    def command(self, side: Side) -> str:
        """The command that serves with a side's setting."""
        words = ["vllm", "serve", self.model, *self.flags]
        if side.spec is not None:
            words += ["--speculative-config", json.dumps(side.spec)]
        return shlex.join(words)

    def advice(self) -> str:
        """The best setting, and what keeps it from being certain."""
        lines, best, unsteady = [], self.best(), self.unsteadiness()
        if best is not None:
            gains = [f"{self.ratio(best, n):.2f}× at {n}" for n in self.loads]
            gain = (
                ", ".join(gains) + " at a time, over" if best.spec else "no gain over"
            )
            what = "Best so far" if self.measured.not_reached else "Best"
            lines += [f"{what}: {gain} no speculation", self.command(best)]
        elif unsteady <= USELESS:
            lines.append("Nothing is known of any drafter: none is fully measured.")
        if unsteady > UNSTEADY:
            lines.append(
                f"Unsteady: no speculation differs by {unsteady:.1f}× between its "
                "rounds. Something else ran on this machine: run again, alone."
            )
        lines += [f"Failed: {n}: {why}" for n, why in self.measured.failed.items()]
        if self.measured.not_reached:
            lines.append(f"Not measured: {', '.join(self.measured.not_reached)}")
        return "\n".join(lines)

    def as_json(self) -> dict[str, Any]:
        found = {
            "model": self.model,
            "rows": list(self.rows()),
            "failed": self.measured.failed,
            "not_reached": self.measured.not_reached,
            "unsteadiness": self.unsteadiness(),
            "is_lossless": self.is_lossless,
            "tie_within": self.measured.within,
            "output": {side.name: asdict(side.comparison) for side in self.compared},
        }
        if (best := self.best()) is not None:
            found["best"] = {"name": best.name, "command": self.command(best)}
        return found


def cells(row: dict[str, Any]) -> list[str]:
    """A row of the table."""
    shares = zip(row["acceptance_by_position"], row["drafted_by_position"], strict=True)
    # "auto" seldom drafts the last ones, if at all.
    shown = [f"{share:.2f}".lstrip("0") for share, n in shares if n >= LEAST_DRAFTED]
    texts = [str(row["requests"]), row["drafter"], row["drafts"], " ".join(shown)]
    for name, factor, digits in NUMBERS.values():
        known = row[name] is not None
        texts.append(f"{row[name] * factor:.{digits}f}" if known else "")
    return texts
