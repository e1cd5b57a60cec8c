# SPDX-License-Identifier: Apache-2.0
"""Questions of MT-Bench, GSM8K and HumanEval, from their files: no hub is needed."""

import gzip
import json
from pathlib import Path

# By question set: the field of a row that has the question.
FIELDS = {"mt-bench": "turns", "gsm8k": "question", "humaneval": "prompt"}
MT_BENCH = range(81, 161)  # question ids; Spec-Bench's file has other questions, too


def read_questions(name: str, file: Path) -> list[str]:
    """All questions of a set; of MT-Bench the first turns.

    Args:
        name: a key of `FIELDS`.
        file: JSON lines, as the sets are published: `question.jsonl` of MT-Bench or
            Spec-Bench, `test.jsonl` of GSM8K, `HumanEval.jsonl.gz`.

    Raises:
        ValueError: there is no such file, or it has other rows.
    """
    if not file.is_file():
        raise ValueError(f"--dataset-path {file}: no such file; it holds {name}.")
    opened = gzip.open if file.suffix == ".gz" else open
    try:
        with opened(file, "rt", encoding="utf-8") as lines:
            rows = [json.loads(line) for line in lines if line.strip()]
        if name == "mt-bench":
            rows = [row for row in rows if row["question_id"] in MT_BENCH]
        questions = [row[FIELDS[name]] for row in rows]
    except (KeyError, TypeError, json.JSONDecodeError):
        raise ValueError(
            f"--dataset-path {file}: not the questions of {name}: each line needs the "
            f'field "{FIELDS[name]}".'
        ) from None
    return [text if isinstance(text, str) else text[0] for text in questions]
