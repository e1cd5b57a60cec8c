# SPDX-License-Identifier: Apache-2.0
"""The change as patches for upstream: `python -m tools.upstream export | try`."""

import argparse
import sys
from pathlib import Path

from tools.overlay.base import find_wheel, pinned_base, target_device
from tools.overlay.command import run

from .export import export
from .results import record
from .trial import apply_series, fresh, try_all, try_each


def run_export(args: argparse.Namespace) -> int:
    for patch in export(args.output, base_wheel()):
        print(patch)
    return 0


def run_try(args: argparse.Namespace) -> int:
    wheel = base_wheel()
    # Git and pytest run in the tree, where a relative path means another folder.
    output = args.output.resolve()
    patches = export(output / "patches", wheel)
    tree = fresh(output / "tree")
    apply_series(patches, wheel, tree)
    tried = list((try_each if args.each else try_all)(tree, *args.pytest))
    if args.record:
        record(tried, args.pytest, target_device())
    return int(not all(one.is_good for one in tried))


def base_wheel() -> Path:
    return find_wheel(pinned_base(target_device()))


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m tools.upstream", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="command")
    export = commands.add_parser("export", help="write patches and pull-request texts")
    export.set_defaults(run=run_export)
    attempt = commands.add_parser(
        "try", help="apply them to the base's files and run the tests they bring"
    )
    attempt.set_defaults(run=run_try)
    attempt.add_argument(
        "--each", action="store_true", help="after each patch the tests that it brings"
    )
    attempt.add_argument(
        "--record", action="store_true", help="keep it in tools/upstream/results.json"
    )
    attempt.add_argument("pytest", nargs="*", help="options of pytest, after --")
    for command in (export, attempt):
        command.add_argument("--output", type=Path, required=True, help="folder")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    return run(parse(argv))


if __name__ == "__main__":
    sys.exit(main())
