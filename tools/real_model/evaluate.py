# SPDX-License-Identifier: Apache-2.0
"""Serves a head as the trainer wrote it, and counts the drafts that are accepted."""

import json
from itertools import product, zip_longest
from pathlib import Path
from typing import Any

import pandas as pd
from transformers import AutoTokenizer

from vllm.benchmarks.drafters.engine import Engine
from vllm.benchmarks.drafters.prompts import encode_chat

from .heads import K
from .questions import SETS
from .questions import questions as read

NONE = "none"


def evaluate(
    name: str,
    head: Path | None,
    model: Path,
    questions: Path,
    out: Path,
    limit: int | None,
    tokens: int,
    temperatures: list[float],
    spec: dict[str, Any],
    engine: dict[str, Any],
) -> None:
    """Writes OUT/NAME.json: for each temperature and set the drafts' counts, and the
    greedy answers' tokens.

    Args:
        head: None: no speculation, which writes the answers to compare with.
        questions: folder.
        limit: questions of each set; None: all.
        spec: more keys of the speculative config.
        engine: arguments of `LLM`.
    """
    if head is not None:
        spec = {"model": str(head), "num_speculative_tokens": K} | spec
    served = Engine(
        model=str(model),
        speculative_config=None if head is None else spec,
        disable_log_stats=False,
        **engine,
    )
    tokenizer = AutoTokenizer.from_pretrained(model)
    load = served.llm.llm_engine.vllm_config.scheduler_config.max_num_seqs
    found: dict[str, Any] = {}
    for each, temperature in product(SETS, temperatures):
        prompts = [encode_chat(tokenizer, q) for q in read(questions, each)[:limit]]
        sampling = {"temperature": temperature, "max_tokens": tokens, "seed": 0}
        got = served.run(prompts, sampling, load)
        row = found.setdefault(f"{temperature:g}", {})[each] = {"counts": got.counts}
        if not temperature:
            row["answers"] = [answer.tokens for answer in got.answers]
    out.mkdir(parents=True, exist_ok=True)
    result = {"spec": spec, "temperatures": found}
    (out / f"{name}.json").write_text(json.dumps(result))
    served.end()


def report(out: Path, model: Path | None = None) -> str:
    """Markdown tables of all results in a folder: tokens a step by K, and by
    temperature."""
    results = {path.stem: json.loads(path.read_text()) for path in out.glob("*.json")}
    target = results.pop(NONE, {})
    by_length, by_temperature = [], []
    for name, result in sorted(results.items()):
        for each in (*SETS, "all"):
            if not (greedy := _found(result, "0", each)):
                continue
            lengths = acceptance_lengths(greedy["counts"])
            same = _same(greedy["answers"], _found(target, "0", each))
            cells = dict(enumerate(lengths, 1)) | {"as the target's": same}
            by_length.append({"drafter": name, "questions": each} | cells)
        cells = {
            f"T {temperature}": acceptance_lengths(found["counts"])[-1]
            for temperature in result["temperatures"]
            if (found := _found(result, temperature, "all"))
        }
        by_temperature.append({"drafter": name} | cells)
    tables = (pd.DataFrame(rows).round(2) for rows in (by_length, by_temperature))
    return "\n\n".join(table.to_markdown(index=False) for table in tables)


def acceptance_lengths(counts: dict[str, list[int]]) -> list[float]:
    """Tokens a step, of chains by K; the last one counts all that was accepted.

    What is drafted at a position does not depend on how many drafts follow.
    """
    drafts = max(counts["drafts"][0], 1)
    accepted = counts["accepted_tokens_per_pos"]
    return [1 + sum(accepted[: k + 1]) / drafts for k in range(len(accepted))]


def _found(result: dict[str, Any], temperature: str, each: str) -> dict[str, Any]:
    """What a set of questions, or "all" of them, has at a temperature."""
    sets = result.get("temperatures", {}).get(temperature, {})
    if each != "all" or not sets:
        return sets.get(each, {})
    counts = {
        name: [
            sum(n)
            for n in zip_longest(
                *(s["counts"][name] for s in sets.values()), fillvalue=0
            )
        ]
        for name in next(iter(sets.values()))["counts"]
    }
    answers = [answer for s in sets.values() for answer in s.get("answers", [])]
    return {"counts": counts, "answers": answers}


def _same(answers: list[list[int]], target: dict[str, Any]) -> str:
    if not target:
        return "?"
    pairs = zip(answers, target["answers"], strict=True)
    return f"{sum(mine == other for mine, other in pairs)} of {len(answers)}"
