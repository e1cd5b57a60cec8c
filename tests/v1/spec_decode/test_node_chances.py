# SPDX-License-Identifier: Apache-2.0
"""Chances of nodes: learnt from verified ones, rising with the path's probability."""

import numpy as np
import pytest

from vllm.v1.spec_decode.dynamic.node_chances import NodeChances, log_odds

# Underconfident, as it says, and overconfident by far.
LINES = [(1.5, 0.8), (0.0, 1.0), (-2.0, 0.7)]


def some_paths(rng: np.random.Generator, count: int) -> np.ndarray:
    return rng.random(count) ** 3


def accepted(rng: np.random.Generator, paths: np.ndarray, line) -> np.ndarray:
    intercept, slope = line
    return rng.logistic(size=len(paths)) < intercept + slope * log_odds(paths)


@pytest.mark.parametrize("line", LINES)
@pytest.mark.parametrize("threshold", [0.0, 0.1])
def test_chances_are_learnt(line, threshold: float):
    """In some dozen steps, also where unlikely nodes are never verified."""
    rng, chances = np.random.default_rng(0), NodeChances()
    for _ in range(40):
        paths = some_paths(rng, 200)
        paths = paths[paths >= threshold]
        chances.observe(paths, accepted(rng, paths, line))
    paths = np.sort(some_paths(rng, 20000))
    found = chances.of(paths)
    assert (np.diff(found) >= 0).all()
    for part in (paths < 0.3, (paths >= 0.3) & (paths < 0.7), paths >= 0.7):
        wanted = accepted(rng, paths[part], line).mean()
        assert found[part].mean() == pytest.approx(wanted, abs=0.04)


def test_chances_change_with_the_text():
    rng, chances = np.random.default_rng(0), NodeChances()
    for line in LINES[::2]:
        for _ in range(400):
            paths = some_paths(rng, 50)
            chances.observe(paths, accepted(rng, paths, line))
    paths = some_paths(rng, 20000)
    wanted = accepted(rng, paths, LINES[2]).mean()
    assert chances.of(paths).mean() == pytest.approx(wanted, abs=0.04)


def test_what_cannot_be_accepted_teaches_nothing():
    """The nodes beside a chain that a request needs; and text of which all is."""
    chances = NodeChances()
    before = chances.of(np.array([0.2, 0.9]))
    chances.observe(np.zeros(100), np.zeros(100, dtype=bool))
    assert (chances.of(np.array([0.2, 0.9])) == before).all()
    assert chances.of(np.zeros(3)).tolist() == [0.0] * 3
    for _ in range(500):
        chances.observe(np.full(50, 0.9), np.ones(50, dtype=bool))
    found = chances.of(np.array([0.001, 0.2, 0.9, 1.0]))
    assert np.isfinite(found).all() and (np.diff(found) >= 0).all()
    assert found[2] > 0.98
