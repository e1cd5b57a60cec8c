# SPDX-License-Identifier: Apache-2.0
"""Command line: run the stages in order, or some of them."""

import argparse
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path

import torch

from . import distill, drafts, heads, pard2, target, tokenizer
from .loop import report
from .settings import Run

STAGES: dict[str, Callable[[Run], None]] = {
    "tokenizer": tokenizer.train,
    "target": target.train,
    "distill": distill.generate,
    "draft": drafts.train_draft,
    "pard": drafts.train_pard,
    "pard2": pard2.train_pard2,
    "eagle3": heads.train_eagle3,
    "peagle": heads.train_peagle,
}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tools.tiny_models")
    parser.add_argument("--out", type=Path, default=Path("models"))
    parser.add_argument("--work", type=Path, default=Path("build/tiny_models"))
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    parser.add_argument("--stdlib", type=Path, default=stdlib)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=device)
    parser.add_argument("--scale", type=float, default=1.0, help="steps and text")
    parser.add_argument("--batch-scale", type=float, default=1.0)
    parser.add_argument("--only", nargs="+", choices=STAGES, default=list(STAGES))
    return parser.parse_args()


def main() -> None:
    args = parse()
    only = args.only
    del args.only
    run = Run(**vars(args))
    run.out.mkdir(parents=True, exist_ok=True)
    run.work.mkdir(parents=True, exist_ok=True)
    torch.set_float32_matmul_precision("high")
    start = time.monotonic()
    for name in only:
        STAGES[name](run)
        report(name, "done", start)


if __name__ == "__main__":
    main()
