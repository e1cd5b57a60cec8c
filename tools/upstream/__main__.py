# SPDX-License-Identifier: Apache-2.0
"""The change as patches for upstream: `python -m tools.upstream export | try`."""

import argparse
import sys
from pathlib import Path

from tools.overlay.base import OverlayError, find_wheel, pinned_base, target_device

from .export import export
from .series import SeriesError
from .text import FoldError
from .trial import apply_series, fresh, try_all, try_each


def run_export(args: argparse.Namespace, wheel: Path) -> int:
    for patch in export(args.output, wheel):
        print(patch)
    return 0


def run_try(args: argparse.Namespace, wheel: Path) -> int:
    patches = export(args.output / "patches", wheel)
    tree = fresh(args.output / "tree")
    apply_series(patches, wheel, tree)
    run = try_each if args.each else try_all
    return int(not run(tree, *args.pytest))


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
    attempt.add_argument("pytest", nargs="*", help="options of pytest, after --")
    for command in (export, attempt):
        command.add_argument("--output", type=Path, required=True, help="folder")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    try:
        return args.run(args, find_wheel(pinned_base(target_device())))
    except (OverlayError, SeriesError, FoldError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
