# SPDX-License-Identifier: Apache-2.0
"""The Grafana dashboard is what its script writes, and its queries are well formed.

Whether a server exports what they ask for is tested with the server, in
tests/entrypoints/openai/test_spec_decode_server.py.
"""

import json
import re

import pytest

from tests.examples.promql import Selector, parse, unexported
from tools.dashboard import FILE, VARIABLES, dashboard

DASHBOARD = json.loads(FILE.read_text())
TARGETS = [
    pytest.param(panel, target, id=f"{panel['title']} {target['refId']}")
    for panel in DASHBOARD["panels"]
    for target in panel["targets"]
]


def test_file_is_up_to_date():
    """`python -m tools.dashboard` writes it."""
    assert dashboard() == DASHBOARD


@pytest.mark.parametrize("panel, target", TARGETS)
def test_query(panel, target):
    expression = parse(target["expr"])
    assert expression.selectors
    legend = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
    assert legend == expression.grouped
    for selector in expression.selectors:
        assert selector.labels <= VARIABLES.keys()
        # A share of one mode is not one of all.
        drafts = "spec_decode" in selector.metric
        assert selector.labels == VARIABLES.keys() - ({"mode"} if not drafts else set())


def test_panels_fill_the_rows():
    taken = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not taken & cells
        taken |= cells
    assert taken == {(x, y) for x in range(24) for y in range(28)}


@pytest.mark.parametrize(
    "wrong, why",
    [
        ("sum(rate(vllm:a_total[1m])", "open bracket"),
        ("sum(vllm:a_total))", "bracket too many"),
        ("summ(vllm:a_total)", "neither function nor label"),
        ('vllm:a_total{mode=~"x"', "open brace"),
        ("vllm:a_total{mode}", "not compared"),
        ("vllm:a_total ? 1", "not PromQL"),
    ],
)
def test_parser_refuses(wrong, why):
    with pytest.raises(ValueError, match=why):
        parse(wrong)


def test_unexported():
    query = 'sum by (mode) (rate(vllm:a_total{job=~"$job", no=~"x"}[5m])) / vllm:b'
    expression = parse(query)
    assert expression.selectors == [
        Selector("vllm:a_total", frozenset({"job", "no"})),
        Selector("vllm:b", frozenset()),
    ]
    assert unexported(expression, {"vllm:a_total": {"x"}}, {"job"}) == [
        "vllm:a_total.mode",
        "vllm:a_total.no",
        "vllm:b",
    ]
