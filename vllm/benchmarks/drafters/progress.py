# SPDX-License-Identifier: Apache-2.0
"""A progress bar that knows what is left to do, and how long its like took."""

import sys
import time
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager

from tqdm import tqdm

BAR = "{desc}: {percentage:3.0f}%|{bar:20}| {elapsed}{postfix}"


class Progress:
    """To be told what is done; shows the time left by the last one of each kind.

    Where there is no terminal to draw a bar in, a line for each part of the whole.

    Args:
        todo: the kind of each thing to do.
    """

    def __init__(self, todo: Iterable[Hashable]):
        self.left = Counter(todo)
        self.took: dict[Hashable, float] = {}
        self.total, self.began = self.left.total(), time.monotonic()
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
        """These will not be done, or are done."""
        done = Counter(kinds)
        self.left -= done
        left = tqdm.format_interval(self.seconds_left())
        self.bar.set_postfix_str(f"{left} left", refresh=False)
        self.bar.update(done.total())

    def seconds_left(self) -> float:
        """What has not been done yet of its kind takes as long as the shortest has."""
        usual = min(self.took.values(), default=0.0)
        return sum(n * self.took.get(kind, usual) for kind, n in self.left.items())
