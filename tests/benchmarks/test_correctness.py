# SPDX-License-Identifier: Apache-2.0
"""What is kept of an engine's outputs beside the target's alone."""

from types import SimpleNamespace

from benchmarks.spec_decode.correctness import TIE, compare, gaps
from benchmarks.spec_decode.tables import correctness_table

ALONE = {"tokens": [[1, 2, 3], [4, 5, 6]], "gaps": [[9.0] * 3, [9.0, TIE / 2, 9.0]]}
FOUND = {"acceptance": [0.5, 0.25], "steps": 4, "graphs_replayed": 3}


def test_equal_outputs():
    kept = compare({**FOUND, "tokens": ALONE["tokens"]}, ALONE)
    assert kept["differences"] == [] and kept["are_ties"]
    assert kept["acceptance_length"] == 1.75


def test_a_tie_is_told_from_a_difference():
    tie = compare({**FOUND, "tokens": [[1, 2, 3], [4, 9, 9]]}, ALONE)
    assert tie["differences"] == [{"request": 1, "token": 1, "logprob_gap": TIE / 2}]
    assert tie["are_ties"]
    wrong = compare({**FOUND, "tokens": [[1, 2, 7], [4, 9, 9]]}, ALONE)
    assert not wrong["are_ties"]
    rows = correctness_table({"tie": tie, "wrong": wrong}).splitlines()
    assert "| 1 of 2 | yes | 1.75 | 0.50 0.25 | 3 in 4 steps |" in rows[2]
    assert "| 0 of 2 | **no** |" in rows[3]


def test_gap_is_between_the_two_best():
    def token(rank: int, logprob: float) -> SimpleNamespace:
        return SimpleNamespace(rank=rank, logprob=logprob)

    assert gaps([{7: token(2, -1.5), 8: token(1, -0.5)}]) == [1.0]
    assert gaps(None) == []
