# SPDX-License-Identifier: Apache-2.0
"""Reads PromQL expressions far enough to know which metrics and labels they ask for."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

TOKEN = re.compile(
    r"""\s+
    | (?P<metric>[a-z_]+:\w+) | (?P<name>[a-z_]\w*) | (?P<number>\d+(\.\d+)?)
    | (?P<text>"[^"]*") | (?P<range>\[[^\]]+\]) | (?P<sign>=~|[-+*/><=(){},])""",
    re.VERBOSE,
)
FUNCTIONS = {"sum", "rate", "label_values"}
GROUPINGS = {"by", "on", "group_left"}


@dataclass(frozen=True)
class Selector:
    metric: str
    labels: frozenset[str]  # that series are chosen by


@dataclass
class Expression:
    selectors: list[Selector]
    grouped: set[str]  # labels of any `by`, `on` or `group_left`


def tokens(text: str) -> Iterator[tuple[str, str]]:
    at = 0
    while at < len(text):
        found = TOKEN.match(text, at)
        if found is None:
            raise ValueError(f"not PromQL at {text[at:]!r}")
        at = found.end()
        if found.lastgroup:
            yield found.lastgroup, found.group()


def parse(text: str) -> Expression:
    """What an expression asks for.

    Raises:
        ValueError: a bracket is not closed, or something is not understood.
    """
    found, waiting = Expression([], set()), list(tokens(text))
    depth, grouping = 0, False
    while waiting:
        kind, token = waiting.pop(0)
        after = waiting[0][1] if waiting else ""
        if kind == "metric":
            found.selectors.append(Selector(token, _matched(waiting)))
        elif kind == "name" and (grouping or token not in FUNCTIONS | GROUPINGS):
            # Second argument of label_values, or a label to group by.
            if not grouping and "label_values" not in text:
                raise ValueError(f"neither function nor label: {token}")
            found.grouped.add(token)
        elif token in GROUPINGS:
            grouping = after == "("
        depth += {"(": 1, ")": -1}.get(token, 0)
        if token == ")":
            grouping = False
        if depth < 0:
            raise ValueError(f"a bracket too many in {text!r}")
    if depth:
        raise ValueError(f"an open bracket in {text!r}")
    return found


def _matched(waiting: list[tuple[str, str]]) -> frozenset[str]:
    """Labels between the braces behind a metric, which are taken off."""
    if not waiting or waiting[0][1] != "{":
        return frozenset()
    labels, inside = set(), [waiting.pop(0)[1]]
    while inside[-1] != "}":
        if not waiting:
            raise ValueError("an open brace")
        kind, token = waiting.pop(0)
        inside.append(token)
        if kind == "name":
            labels.add(token)
            if [kind for kind, _ in waiting[:2]] != ["sign", "text"]:
                raise ValueError(f"label {token} is not compared with a text")
    return frozenset(labels)


def unexported(
    expression: Expression, exported: dict[str, set[str]], scraped: set[str]
) -> list[str]:
    """Metrics, and labels of them, that no server has.

    Args:
        expression: parsed.
        exported: labels of each exported sample, by its name.
        scraped: labels that Prometheus adds.
    """
    missing = []
    for selector in expression.selectors:
        if selector.metric not in exported:
            missing.append(selector.metric)
            continue
        has = exported[selector.metric] | scraped
        wanted = selector.labels | expression.grouped
        missing += [f"{selector.metric}.{label}" for label in sorted(wanted - has)]
    return missing
