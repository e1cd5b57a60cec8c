# SPDX-License-Identifier: Apache-2.0
"""A progress bar that estimates the time left by kind of task."""

import sys
import time
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager

from tqdm import tqdm

BAR = "{desc}: {percentage:3.0f}%|{bar:20}| {elapsed}{postfix}"


class Progress:
    """Shows the time left, by how long the last task of each kind took.

    Without a terminal to draw a bar in, it prints a line for each part.

    Args:
        todo: the kind of each task.
    """

    def __init__(self, todo: Iterable[Hashable]):
        self.left = Counter(todo)
        self.took: dict[Hashable, float] = {}
        self.total, self.began = self.left.total(), time.monotonic()
        tqdm.monitor_interval = 0  # a thread, but engines are forked from this process
        self.bar = tqdm(total=self.total, bar_format=BAR, disable=None)

    def begin(self, part: str) -> None:
        if self.bar.disable:
            share = 1 - self.left.total() / self.total
            passed = tqdm.format_interval(time.monotonic() - self.began)
            print(f"{share:4.0%} {passed} {part}", file=sys.stderr)

    @contextmanager
    def doing(self, kind: Hashable, what: str) -> Iterator[None]:
        self.bar.set_description_str(what)
        begin = time.monotonic()
        yield
        self.took[kind] = time.monotonic() - begin
        self.skip([kind])

    def skip(self, kinds: Iterable[Hashable]) -> None:
        """Counts tasks as done; they are, or will never be."""
        done = Counter(kinds)
        self.left -= done
        left = tqdm.format_interval(self.seconds_left())
        self.bar.set_postfix_str(f"{left} left", refresh=False)
        self.bar.update(done.total())

    def seconds_left(self) -> float:
        """A task of a kind that has not run yet counts as the shortest that has."""
        usual = min(self.took.values(), default=0.0)
        return sum(n * self.took.get(kind, usual) for kind, n in self.left.items())
