# SPDX-License-Identifier: Apache-2.0
"""Serves a head as the trainer wrote it, and counts the drafts that are accepted."""

import json
from itertools import zip_longest
from pathlib import Path
from typing import Any

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
    engine: dict[str, Any],
) -> None:
    """Writes OUT/NAME.json: for each set the answers' tokens and the drafts' counts.

    Args:
        head: None: no speculation, which writes the answers to compare with.
        questions: folder.
        limit: questions of each set; None: all.
        engine: arguments of `LLM`.
    """
    spec = head and {"model": str(head), "num_speculative_tokens": K}
    served = Engine(
        model=str(model), speculative_config=spec, disable_log_stats=False, **engine
    )
    tokenizer, found = AutoTokenizer.from_pretrained(model), {}
    load = served.llm.llm_engine.vllm_config.scheduler_config.max_num_seqs
    for each in SETS:
        prompts = [encode_chat(tokenizer, q) for q in read(questions, each)[:limit]]
        sampling = {"temperature": 0.0, "max_tokens": tokens}
        result = served.run(prompts, sampling, load)
        answers = [answer.tokens for answer in result.answers]
        found[each] = {"counts": result.counts, "answers": answers}
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{name}.json").write_text(json.dumps(found))
    served.end()


def report(out: Path, model: Path | None = None) -> str:
    """A Markdown table of all results in a folder."""
    results = {path.stem: json.loads(path.read_text()) for path in out.glob("*.json")}
    target = results.pop(NONE, {})
    lines = [
        "| head | questions | tokens a step | accepted by position | as the target's |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, result in sorted(results.items()):
        result["all"] = _all(list(result.values()))
        for each, found in result.items():
            (drafts,), (accepted,) = (
                found["counts"][count] for count in ("drafts", "accepted_tokens")
            )
            by_position = found["counts"]["accepted_tokens_per_pos"]
            rates = " ".join(f"{count / max(drafts, 1):.2f}" for count in by_position)
            length = 1 + accepted / max(drafts, 1)
            same = _same(found["answers"], target, each)
            lines.append(f"| {name} | {each} | {length:.2f} | {rates} | {same} |")
    return "\n".join(lines)


def _all(sets: list[dict[str, Any]]) -> dict[str, Any]:
    counts = {
        name: [
            sum(n) for n in zip_longest(*(s["counts"][name] for s in sets), fillvalue=0)
        ]
        for name in sets[0]["counts"]
    }
    return {"counts": counts, "answers": [a for s in sets for a in s["answers"]]}


def _same(answers: list[list[int]], target: dict[str, Any], each: str) -> str:
    if not target:
        return "?"
    others = _all(list(target.values())) if each == "all" else target[each]
    pairs = zip(answers, others["answers"], strict=True)
    return f"{sum(mine == other for mine, other in pairs)} of {len(answers)}"
