# SPDX-License-Identifier: Apache-2.0
"""Serves a head as the trainer wrote it, and counts the drafts that are accepted."""

import datetime
import json
from itertools import product
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from vllm import __version__
from vllm.benchmarks.drafters.engine import Engine
from vllm.benchmarks.drafters.prompts import encode_chat
from vllm.platforms import current_platform

from .heads import K
from .questions import SETS
from .questions import questions as read


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
    record: bool,
    engine: dict[str, Any],
) -> None:
    """Writes OUT/NAME.json: for each temperature and set the drafts' counts, and the
    tokens of answers that are greedy or the target's own. It is written after each set,
    so that a run that is cut off leaves what it has.

    Args:
        head: None: no speculation, which writes the answers to compare with.
        questions: folder.
        limit: questions of each set; None: all.
        spec: more keys of the speculative config, `draft_tree` with `record`.
        record: accept nothing, and also write OUT/NAME-TEXT.npz for each temperature:
            what is drafted after every token (see `benchmarks.spec_decode.traces`).
        engine: arguments of `LLM`.
    """
    asked = {each: read(questions, each)[:limit] for each in SETS}
    if current_platform.is_cpu():  # where compiling takes longer than a few answers
        engine = {"dtype": "float32", "compilation_config": {"mode": 0}} | engine
    if head is not None:
        spec = {"model": str(head), "num_speculative_tokens": K} | spec
    if record:
        engine = {"async_scheduling": False} | engine
    served = Engine(
        model=str(model),
        speculative_config=None if head is None else spec,
        disable_log_stats=False,
        **engine,
    )
    recorder = None
    if record:
        from benchmarks.spec_decode.record import Recorder  # it needs the unified parts

        recorder = Recorder(served.llm)
    tokenizer = AutoTokenizer.from_pretrained(model)
    load = served.llm.llm_engine.vllm_config.scheduler_config.max_num_seqs
    found: dict[str, dict[str, Any]] = {}
    result = {
        "date": datetime.date.today().isoformat(),
        "device": current_platform.get_device_name(),
        "dtype": served.describe()["dtype"],
        "vllm": __version__.partition("+")[0],
        "limit": limit,
        "spec": spec,
        "temperatures": found,
    }
    out.mkdir(parents=True, exist_ok=True)
    for temperature, each in product(temperatures, SETS):
        prompts = [encode_chat(tokenizer, question) for question in asked[each]]
        sampling = {"temperature": temperature, "max_tokens": tokens, "seed": 0}
        got = served.run(prompts, sampling, load)
        row = found.setdefault(f"{temperature:g}", {})[each] = {"counts": got.counts}
        if head is None or not temperature:
            row["answers"] = [answer.tokens for answer in got.answers]
        (out / f"{name}.json").write_text(json.dumps(result))
        if recorder is not None:
            recorder.add(prompts, [answer.tokens for answer in got.answers])
            if each == SETS[-1]:
                header = {key: result[key] for key in ("date", "device", "limit")}
                header |= {"drafter": name, "temperature": temperature}
                text = f"t{temperature:g}" if temperature else "greedy"
                recorder.take(header).save(out / f"{name}-{text}.npz")
    served.end()
