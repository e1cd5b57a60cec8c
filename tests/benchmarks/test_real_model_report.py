# SPDX-License-Identifier: Apache-2.0
"""Tables of what drafters of the real model have accepted."""

import json
from pathlib import Path

from tools.real_model import evaluate


def test_report(tmp_path: Path):
    def result(name: str, answers: list[list[int]], temperatures: tuple[str, ...]):
        counts = {
            "drafts": [10],
            "accepted_tokens": [12],
            "accepted_tokens_per_pos": [8, 4],
        }
        found = {
            temperature: {"gsm8k": {"counts": counts, "answers": answers}}
            for temperature in temperatures
        }
        text = json.dumps({"spec": {}, "temperatures": found})
        (tmp_path / f"{name}.json").write_text(text)

    result(evaluate.NONE, [[1], [2, 3]], ("0",))
    result("eagle3", [[1], [2, 4]], ("0", "1.5"))
    lengths, temperatures = evaluate.report(tmp_path).split("\n\n")
    row = [cell.strip() for cell in lengths.splitlines()[-1].strip("|").split("|")]
    assert row == ["eagle3", "all", "1.8", "2.2", "1 of 2"]
    assert "T 1.5" in temperatures and temperatures.splitlines()[-1].count("2.2") == 2
