# SPDX-License-Identifier: Apache-2.0
"""The changes as patches for upstream: `python -m tools.upstream export | try`."""

import argparse
import sys
from pathlib import Path

from tools.overlay.base import run_command

from .export import export
from .trial import try_each


def run_export(args: argparse.Namespace) -> int:
    print(*export(args.output), sep="\n")
    return 0


def run_try(args: argparse.Namespace) -> int:
    export(args.output)
    # Git and pytest run in the tree, where a relative path would be wrong.
    return int(not try_each(args.output.resolve() / "tree", *args.pytest))


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m tools.upstream", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="command")
    export = commands.add_parser("export", help="write patches and pull-request texts")
    export.set_defaults(run=run_export)
    text = "apply them one after the other, and run the tests that each brings"
    attempt = commands.add_parser("try", help=text)
    attempt.set_defaults(run=run_try)
    attempt.add_argument("pytest", nargs="*", help="options of pytest, after --")
    for command in (export, attempt):
        command.add_argument("--output", type=Path, required=True, help="folder")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    return run_command(parse(argv))


if __name__ == "__main__":
    sys.exit(main())
