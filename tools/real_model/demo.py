# SPDX-License-Identifier: Apache-2.0
"""The real model answers three questions, without a drafter and with each bundled head.

If the model cannot be had, the bundled toy is measured instead.
"""

import json
import logging
import os
import shutil
import sys
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from textwrap import wrap
from typing import Any

from transformers import AutoTokenizer

from tools.overlay.base import ROOT, OverlayError
from vllm.benchmarks.drafters import command
from vllm.benchmarks.drafters.measure import Measurement
from vllm.benchmarks.drafters.processes import EngineError
from vllm.benchmarks.drafters.prompts import encode_chat
from vllm.benchmarks.drafters.report import Report
from vllm.logger import configure_logging_from_args
from vllm.model_executor.models import registry
from vllm.platforms import current_platform

from .heads import fill
from .model import real_model
from .questions import COMPLETE

# Folders of models/, and how much the heads draft.
HEADS, DRAFTS = ("smollm2-eagle3", "smollm2-peagle"), {"num_speculative_tokens": 5}
# Architectures of the model and the heads.
CLASSES = "LlamaForCausalLM", "Eagle3LlamaForCausalLM", "PeagleQwen3ForCausalLM"
# One of each kind that the heads are evaluated on.
QUESTIONS = (
    "A bakery bakes 24 loaves of bread a day and sells each of them for $3. How much "
    "money does it make in a week?",
    COMPLETE.format(
        'def count_vowels(text: str) -> int:\n    """Counts the vowels of a text.\n\n'
        '    >>> count_vowels("hello")\n    2\n    """\n'
    ),
    "Write a short e-mail that thanks a colleague for help with a project.",
)
FLAGS = "--quick --repeats=1 --concurrency=1 --output-len=96 --max-model-len=1024 "
FLAGS += f"--gpu-memory-utilization=0.3 --kv-cache-memory-bytes={1 << 28} "
FLAGS += "-cc.mode=none"  # compiling takes longer than all answers
ON_CPU = ["--dtype=float32"]  # two bfloat16 logits are often equal
TOY = ["-m", "vllm.entrypoints.cli.main", "bench", "drafters", "--quick"]


def look_into_classes() -> None:
    """As engines would, the first time, in a process for each class: to import vLLM
    takes seconds. This process may initialize CUDA, as engines have their own."""
    registry._run_in_subprocess = lambda look: look()
    for name in CLASSES:
        registry.ModelRegistry.models[name].inspect_model_cls()


def demo() -> int:
    """Prints the answers beside each other, and the report of `vllm bench drafters`.

    Returns:
        The exit status.
    """
    try:
        model = real_model()
    except (OverlayError, ImportError) as error:
        print(f"The toy runs, not the real model: {in_short(error)}", flush=True)
        os.execv(sys.executable, [sys.executable, *TOY])
    words = [f"--model={model}", *FLAGS.split(), *ON_CPU * current_platform.is_cpu()]
    words += ["--drafter", *map(json.dumps, fill_bundled(model))]
    args = command.parse(words)
    command.fill_in(args)
    configure_logging_from_args(args)  # else an engine config does, and logs
    logging.getLogger("vllm").setLevel(logging.ERROR)
    tokenizer = AutoTokenizer.from_pretrained(model)
    measured = command.prepare(args, None)
    measured.prompts = [encode_chat(tokenizer, text) for text in QUESTIONS]
    measured.loads = {1: len(QUESTIONS)}
    measured.sides.pop()  # no speculation again: how steady the machine is
    measured.starts_together = True
    try:
        measured.run()
    except EngineError as error:
        raise OverlayError(str(error)) from None
    report = Report(measured, args.model, command.engine_flags(words))
    print("\n".join(answers(measured, tokenizer)))
    print("\n\n".join([report.table(), report.verdict(), report.advice()]))
    return int(bool(measured.failed or report.is_lossless is False))


def in_short(error: Exception) -> str:
    """An error in a line: how it begins, and what it ends with, which is what to do."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:1] + lines[1:][-2:])


def fill_bundled(model: Path) -> list[dict[str, Any]]:
    """Puts the bundled heads beside the model; returns their speculative configs."""
    for name in HEADS:
        fill(ROOT / "models" / name, model, model.parent / name)
    return [{"model": str(model.parent / name)} | DRAFTS for name in HEADS]


def answers(measured: Measurement, tokenizer: Any) -> Iterator[str]:
    """Lines: each question, and below it the answers, a column for each side."""
    sides = [side for side in measured.sides if side.rounds]
    width = (shutil.get_terminal_size().columns + 3) // len(sides) - 3
    for number, question in enumerate(QUESTIONS):
        found = [side.rounds[1][0].answers[number].tokens for side in sides]
        texts = tokenizer.batch_decode(found, skip_special_tokens=True)
        yield f"\n{question}\n"
        yield from columns([side.name for side in sides], width)
        yield from columns(["-" * width] * len(sides), width)
        yield from columns(texts, width)
    yield ""


def columns(texts: list[str], width: int) -> Iterator[str]:
    """Lines of texts beside each other."""
    wrapped = [
        [part for line in text.splitlines() for part in wrap(line, width) or [""]]
        for text in texts
    ]
    for parts in zip_longest(*wrapped, fillvalue=""):
        yield " | ".join(part.ljust(width) for part in parts).rstrip()
