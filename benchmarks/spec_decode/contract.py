# SPDX-License-Identifier: Apache-2.0
"""One contract for all drafters: what is accepted on the same questions.

Prints tables of a file of counts, or of those of a folder of results of `python -m
tools.real_model evaluate`, which --store keeps. A result's name is the drafter's, then
what "-" joins: how it drafts, and the dtype unless it is bfloat16. "none" is the target
alone.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd

from benchmarks.spec_decode.report import NAMES
from benchmarks.spec_decode.results import RESULTS

STORED = RESULTS / "nvidia-h200/contract.json"
NONE, GREEDY = "none", "0"
SETS = {"humaneval": "HumanEval", "mt_bench": "MT-Bench", "gsm8k": "GSM8K"}
ABOUT = "python -m tools.real_model evaluate NAME --head HEAD ..."
POINT = ["drafter", "temperature", "questions"]
FLOAT32 = "-float32"
WORDS = NAMES | {"probabilistic": "draft probabilities", "tree": "tree of"}


def condense(folder: Path) -> dict[str, Any]:
    """Where and when results were made, and a point for each of their question sets.

    A temperature without all sets was cut off, and is left out. Of greedy answers a
    point has the number of those that are the target's in the same dtype.
    """
    found = {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}
    about = {"date", "device", "limit", "vllm"} & next(iter(found.values())).keys()
    names = NONE, NONE + FLOAT32  # of the target's answers
    target = [found.get(n, found[NONE])["temperatures"][GREEDY] for n in names]
    points = [
        dict(zip(POINT, (name, temperature, each), strict=True))
        | _counts(sets[each], target[name.endswith(FLOAT32)][each])
        for name, result in sorted(found.items())
        for temperature, sets in sorted(result["temperatures"].items())
        for each in SETS
        if not name.startswith(NONE) and sets.keys() == SETS.keys()
    ]
    made = {key: found[NONE][key] for key in sorted(about)}
    return {"about": ABOUT} | made | {"points": points}


def _counts(found: dict[str, Any], target: dict[str, Any]) -> dict[str, Any]:
    counts, answers = found["counts"], found.get("answers", [])
    depth = sum(n > 0 for n in counts["draft_tokens_per_pos"])
    return {
        "drafts": counts["drafts"][0],
        "accepted": counts["accepted_tokens_per_pos"][:depth],
        "answers": len(answers),
        "same": sum(map(list.__eq__, answers, target["answers"])),
    }


def title(name: str) -> str:
    """A result's name for readers."""
    drafter, *how = (WORDS.get(w, w) for w in name.removesuffix(FLOAT32).split("-"))
    return ", ".join([drafter, " ".join(how)] if how else [drafter])


def accepted(points: list[dict[str, Any]]) -> pd.DataFrame:
    """Share of the steps that accept a draft at a position, which are the columns.

    The rows are drafters, temperatures and questions; "all" are those of all sets. What
    was measured in bfloat16 is not shown in float32 again.
    """
    found = pd.DataFrame(points)
    found = found.sort_values("drafter", key=lambda names: names.str.endswith(FLOAT32))
    found["drafter"] = found["drafter"].map(title)
    found = found.drop_duplicates(POINT).set_index(POINT).sort_index()
    counts = pd.DataFrame(found["accepted"].tolist(), index=found.index)
    counts.columns += 1
    counts["drafts"] = found["drafts"]
    every = counts.groupby(level=POINT[:2]).sum().assign(questions="all")
    counts = pd.concat([counts, every.set_index("questions", append=True)])
    return counts.div(counts.pop("drafts"), axis=0)


def by_length(shares: pd.DataFrame) -> pd.DataFrame:
    """Tokens a step of greedy requests: of chains by K, and of trees by their nodes.

    What a chain drafts at a position does not depend on how many drafts follow. A tree
    of another depth has other nodes, so of trees only the whole one is shown.
    """
    lengths = 1 + shares.xs((GREEDY, "all"), level=POINT[1:]).cumsum(axis=1)
    lengths.index = lengths.index.str.partition(", ").droplevel(1)
    whole = lengths.iloc[:, -1].unstack()
    trees = whole.filter(like="tree").sort_index(
        axis=1, key=lambda n: n.str[8:].astype(int)
    )
    return lengths.xs("", level=1).rename_axis("drafter").join(trees)


def by_questions(shares: pd.DataFrame) -> pd.DataFrame:
    """Tokens a step of greedy requests on each set, with all drafts."""
    lengths = 1 + shares.xs(GREEDY, level="temperature").sum(axis=1)
    return lengths.unstack("questions")[[*SETS]].rename(columns=SETS)


def by_temperature(shares: pd.DataFrame) -> pd.DataFrame:
    """Tokens a step of all questions, with all drafts."""
    lengths = 1 + shares.xs("all", level="questions").sum(axis=1)
    found = lengths.unstack("temperature")
    return found[sorted(found, key=float)].dropna(thresh=2)


def same_answers(points: list[dict[str, Any]]) -> pd.DataFrame:
    """How many greedy answers are the target's, by question set."""
    answered = pd.DataFrame(points).query("answers > 0")
    found = answered.set_index(["drafter", "questions"])
    shown = found["same"].astype(str) + " of " + found["answers"].astype(str)
    return shown.unstack()[[*SETS]].rename(columns=SETS)


def report(stored: dict[str, Any]) -> Iterator[str]:
    """Tables in Markdown."""
    shares = accepted(stored["points"])
    tables = by_length(shares), by_questions(shares), by_temperature(shares)
    for table in filter(len, tables):
        shown = table.map("{:.2f}".format, na_action="ignore").fillna("–")
        yield shown.reset_index().to_markdown(index=False, disable_numparse=True)
    yield same_answers(stored["points"]).reset_index().to_markdown(index=False)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=STORED, help="folder, or file")
    parser.add_argument("--store", type=Path, metavar="FILE", help="for the counts")
    args = parser.parse_args(arguments)
    at, is_folder = args.results, args.results.is_dir()
    found = condense(at) if is_folder else json.loads(at.read_text())
    if args.store:
        text = json.dumps(found).replace(' {"drafter', '\n{"drafter')
        args.store.write_text(text + "\n")
    print(*report(found), sep="\n\n")


if __name__ == "__main__":
    main()
