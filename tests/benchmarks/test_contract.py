# SPDX-License-Identifier: Apache-2.0
"""Counts of what drafters of the real model have accepted, stored and in tables."""

import json
from pathlib import Path

import pytest

from benchmarks.spec_decode import contract
from benchmarks.spec_decode.pictures import draw_contract

COUNTS = {
    "drafts": [10],
    "draft_tokens_per_pos": [10, 10, 0],
    "accepted_tokens_per_pos": [8, 4, 0],
}


def write(folder: Path, name: str, answer: int, temperatures: tuple[str, ...]) -> None:
    """Writes a result that was cut off at temperature 2."""
    row = {"counts": COUNTS}
    found = {t: dict.fromkeys(contract.SETS, row) for t in temperatures}
    found |= {"2": {"gsm8k": row}}
    if "0" in found:
        greedy = row | {"answers": [[1], [2, answer]]}
        found["0"] = dict.fromkeys(contract.SETS, greedy)
    result = {"vllm": "0.33.0", "spec": {}, "temperatures": found}
    (folder / f"{name}.json").write_text(json.dumps(result))


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    """Stored counts of a chain, a tree, and a chain with draft probabilities."""
    for name in "none", "none-float32":
        write(tmp_path, name, 0, ("0",))
    for name in "eagle3", "eagle3-tree-31-float32", "eagle3-float32":
        write(tmp_path, name, 1, ("0", "1.5"))
    write(tmp_path, "eagle3-probabilistic", 1, ("0.3", "1.5"))
    file = tmp_path / "stored" / "contract.json"
    file.parent.mkdir()
    contract.main(["--results", str(tmp_path), "--store", str(file)])
    return file


def test_tables(stored: Path):
    found = json.loads(stored.read_text())
    assert found["vllm"] == "0.33.0"
    lengths, questions, heats, same = (
        [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
        for lines in map(str.splitlines, contract.report(found))
    )
    assert lengths[::2] == [
        ["drafter", "1", "2", "tree of 31"],
        ["EAGLE-3", "1.80", "2.20", "2.20"],
    ]
    assert questions[2:] == [
        ["EAGLE-3", *["2.20"] * 3],
        ["EAGLE-3, tree of 31", *["2.20"] * 3],
    ]
    assert heats[0] == ["drafter", "0", "0.3", "1.5"]
    assert heats[3] == ["EAGLE-3, draft probabilities", "–", "2.20", "2.20"]
    assert same[-1] == ["eagle3-tree-31-float32", *["1 of 2"] * 3]


def test_picture(stored: Path):
    points = json.loads(stored.read_text())["points"]
    places, heats = draw_contract(contract.accepted(points)).axes
    assert [line.get_ydata().tolist() for line in places.lines] == [[0.8, 0.4]] * 2
    assert len(heats.lines) == 3


def test_stored_results_are_read():
    texts = list(contract.report(json.loads(contract.STORED.read_text())))
    assert "P-EAGLE, tree of 31" in texts[1]
