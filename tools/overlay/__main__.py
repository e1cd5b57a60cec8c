# SPDX-License-Identifier: Apache-2.0
"""Commands on the overlay: `python -m tools.overlay check | lock | rebase`."""

import argparse
import sys
from pathlib import Path
from zipfile import ZipFile

from .base import DEVICES, find_wheel, pinned_base, target_device
from .check import check
from .command import run
from .seams import write_lock


def run_check(args: argparse.Namespace) -> int:
    problems = check(args.wheel or find_wheel(pinned_base(target_device())))
    print("\n".join(problems) or "The overlay is in order.")
    return int(bool(problems))


def run_lock(args: argparse.Namespace) -> int:
    wheel_path = args.wheel or find_wheel(pinned_base(target_device()))
    with ZipFile(wheel_path) as wheel:
        lock = write_lock(wheel)
    print(f"seams.lock: {len(lock)} seams on {wheel_path.name}")
    return 0


def run_rebase(args: argparse.Namespace) -> int:
    from .rebase import rebase  # needs packaging, which check and lock do without

    report = rebase(args.version, args.device or target_device(), args.wheel)
    if args.output:
        args.output.write_text(report.text)
    else:
        print(report.text)
    return int(args.strict and not report.clean)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m tools.overlay", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="command")
    check = commands.add_parser("check", help="list all that is wrong with the overlay")
    check.set_defaults(run=run_check)
    lock = commands.add_parser("lock", help="lock the seams to the pinned base")
    lock.set_defaults(run=run_lock)
    rebase = commands.add_parser("rebase", help="what another base would change")
    rebase.set_defaults(run=run_rebase)
    rebase.add_argument("--version", required=True, help="the other release")
    rebase.add_argument("--device", choices=DEVICES, help="default: this machine's")
    rebase.add_argument("--output", type=Path, help="Markdown file to write")
    rebase.add_argument(
        "--strict", action="store_true", help="exit 1 if there is anything to do"
    )
    for command in (check, lock, rebase):
        command.add_argument("--wheel", type=Path, help="a base wheel at hand")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    return run(parse(argv))


if __name__ == "__main__":
    sys.exit(main())
