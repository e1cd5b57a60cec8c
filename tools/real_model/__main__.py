# SPDX-License-Identifier: Apache-2.0
"""The command line."""

import argparse
import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from subprocess import DEVNULL

from tools.overlay.base import run_command

from .model import real_model

HEADS = "eagle3", "peagle", "dflash", "dflash2", "dspark"
DRAFT_MODELS = "draft", "pard", "pard2"


def run(args: argparse.Namespace) -> None:
    """Calls the command's function with the options."""
    options = vars(args)
    module, function = options.pop("call").split(".")
    options.pop("run")
    options["model"] = options["model"] or real_model()
    print(getattr(import_module(f".{module}", __package__), function)(**options) or "")


def demo(_: argparse.Namespace) -> int:
    """Another process makes the model while this one imports what asks it."""
    print("Preparing the model and vLLM", file=sys.stderr)
    making = [sys.executable, "-m", __package__]
    with subprocess.Popen(making, stdout=DEVNULL, stderr=DEVNULL):
        module = import_module(".demo", __package__)
        module.look_into_classes()
    return module.demo()


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(prog="python -m tools.real_model")
    found.description = "Fetches a small real model, and trains drafters for it."
    found.set_defaults(run=lambda _: print(real_model()))
    commands = found.add_subparsers()

    describe = "Answers questions with it and the bundled heads."
    made = commands.add_parser("demo", help=describe, description=describe)
    made.set_defaults(run=demo)

    def command(name: str, call: str, describe: str) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=describe, description=describe)
        made.add_argument("--model", type=Path, help="folder; default: it is fetched")
        made.add_argument("--out", type=Path, required=True)
        made.set_defaults(run=run, call=call)
        return made

    def engine(made: argparse.ArgumentParser, tokens: int) -> None:
        made.add_argument("--questions", type=Path, required=True, help="folder")
        made.add_argument("--tokens", type=int, default=tokens, help="of an answer")
        made.add_argument("--engine", type=json.loads, default={}, help="of LLM, JSON")

    one = command("data", "data.write_text", "The model writes text to train on.")
    engine(one, 448)
    one.add_argument("--samples", type=int, default=6000)
    one.add_argument("--part", type=int, default=0, help="number, and seed")
    one = command("states", "states.write_states", "Hidden states of the text.")
    one.add_argument("--text", type=Path, required=True)
    one.add_argument("--device", default="cuda")
    one = command("train", "train.train", "Trains a head or a draft model.")
    one.add_argument("head", choices=HEADS + DRAFT_MODELS)
    one.add_argument("--data", type=Path, required=True, help="what `states` wrote")
    one.add_argument("--steps", type=int, default=2000)
    one.add_argument("--options", type=json.loads, default={}, help="of training, JSON")
    one = command("evaluate", "evaluate.evaluate", "Counts the drafts accepted.")
    engine(one, 256)
    one.add_argument("name", help="of the result; none: without a head")
    one.add_argument("--head", type=Path, help="folder")
    one.add_argument("--limit", type=int, help="questions of each set")
    one.add_argument("--temperatures", type=float, nargs="+", default=[0.0])
    one.add_argument("--spec", type=json.loads, default={}, help="more keys, JSON")
    one.add_argument("--record", action="store_true", help="drafts, to replay them")
    describe = "Copies a head {} the tensors that it shares with its target."
    slim = command("slim", "heads.slim", describe.format("without"))
    fill = command("fill", "heads.fill", describe.format("again with"))
    fill.add_argument("--whole-vocabulary", action="store_true", help="draft any token")
    for made in slim, fill:
        made.add_argument("head", type=Path, help="folder")
    return found


if __name__ == "__main__":
    sys.exit(run_command(parser().parse_args()))
