# SPDX-License-Identifier: Apache-2.0
"""Commands on the pipelines: check, list, generate, run, test, shard."""

import argparse
import sys
from pathlib import Path

from . import local
from .check import check
from .documents import PipelineError
from .pipeline import pipeline_yaml
from .select import changed_since, select
from .steps import ROOT, Pipelines, load


def run_check(args: argparse.Namespace, pipelines: Pipelines) -> int:
    require_order(pipelines)
    print(f"{len(pipelines.steps)} steps are in order.")
    return 0


def require_order(pipelines: Pipelines) -> None:
    if problems := check(pipelines):
        raise PipelineError(*problems)


def run_list(args: argparse.Namespace, pipelines: Pipelines) -> int:
    for step in pipelines.steps:
        count = step.data.get("num_devices", 1)
        device = step.device if count == 1 else f"{step.device} x{count}"
        when = "optional" if step.optional else ""
        print(f"{step.label:44}{device:12}{when}".rstrip())
    return 0


def run_generate(args: argparse.Namespace, pipelines: Pipelines) -> int:
    require_order(pipelines)
    changed = args.changed
    if args.since:
        changed = changed_since(args.since, args.root)
    selection = select(pipelines, changed)
    why = f": {selection.all_because}" if selection.all_because else ""
    count = f"{len(selection.steps)} of {len(pipelines.steps)} steps"
    print(f"{count}{why}", file=sys.stderr)
    text = pipeline_yaml(pipelines, selection.steps, args.nightly)
    if args.output:
        args.output.write_text(text)
    else:
        print(text, end="")
    return 0


def run_step(args: argparse.Namespace, pipelines: Pipelines) -> int:
    return local.run(pipelines, args.label)


def run_test(args: argparse.Namespace, pipelines: Pipelines) -> int:
    return local.run_all(pipelines, args.pytest_args)


def run_shard(args: argparse.Namespace, pipelines: Pipelines) -> int:
    return local.shard(args.paths, args.root)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m tools.ci", description=__doc__)
    parser.add_argument("--root", type=Path, default=ROOT, help=argparse.SUPPRESS)
    commands = parser.add_subparsers(required=True, metavar="command")

    def add(name: str, run, help: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=help)
        command.set_defaults(run=run)
        return command

    add("check", run_check, "list all that is wrong with .buildkite/")
    add("list", run_list, "the labels of all steps")
    generate = add("generate", run_generate, "the pipeline for a change, as YAML")
    which = generate.add_mutually_exclusive_group(required=True)
    which.add_argument("--changed", nargs="*", metavar="FILE", help="changed files")
    which.add_argument("--since", metavar="REF", help="what differs from this branch")
    which.add_argument("--all", action="store_true", help="every step")
    generate.add_argument(
        "--nightly", action="store_true", help="run optional steps without asking"
    )
    generate.add_argument("--output", type=Path, metavar="FILE")
    step = add("run", run_step, "run one step on this machine, by its label or key")
    step.add_argument("label")
    test = add("test", run_test, "run all CPU steps, their tests by one pytest")
    test.add_argument("pytest_args", nargs="*", help="after --, for pytest")
    shard = add("shard", run_shard, "run this job's share of the tests below paths")
    shard.add_argument("paths", nargs="+")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    try:
        return args.run(args, load(args.root))
    except PipelineError as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
