# SPDX-License-Identifier: Apache-2.0
"""Commands for release: build, reproduce, inspect, base."""

import argparse
import sys
from pathlib import Path
from time import monotonic

from tools.overlay.base import DEVICES, find_wheel, pinned_base, sha256_of
from tools.overlay.command import run

from .build import build_wheel, reproduce
from .inspection import inspect
from .record import record


def run_build(args: argparse.Namespace) -> int:
    make = reproduce if args.command == "reproduce" else build_wheel
    start = monotonic()
    wheel = make(args.device, args.output)
    line = f"{sha256_of(wheel)}  {wheel.name}"
    wheel.with_name(f"{wheel.name}.sha256").write_text(f"{line}\n")
    twice = " twice, with equal bytes," if make is reproduce else ""
    print(f"Built{twice} in {monotonic() - start:.0f} s:\n{line}")
    if args.record:
        record(wheel, args.device)
    return tell(wheel)


def run_inspect(args: argparse.Namespace) -> int:
    return max(map(tell, args.wheels))


def tell(wheel: Path) -> int:
    problems = inspect(wheel)
    print("\n".join(problems) or f"{wheel.name} is in order.")
    return int(bool(problems))


def run_base(args: argparse.Namespace) -> int:
    print(find_wheel(pinned_base(args.device)))
    return 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m tools.package", description=__doc__)
    commands = parser.add_subparsers(required=True, dest="command")
    texts = {
        "build": "build a wheel",
        "reproduce": "build a wheel twice in different surroundings, and compare",
        "base": "path of the base's wheel, fetched if need be",
    }
    for name, text in texts.items():
        command = commands.add_parser(name, help=text)
        command.add_argument("--device", choices=DEVICES, required=True)
        command.set_defaults(run=run_base if name == "base" else run_build)
        if name != "base":
            command.add_argument("--output", type=Path, default=Path("dist"))
            command.set_defaults(record=False)
        if name == "reproduce":
            text = "keep hash and size in tools/package/record.json"
            command.add_argument("--record", action="store_true", help=text)
    command = commands.add_parser("inspect", help="what is wrong with built wheels")
    command.add_argument("wheels", nargs="+", type=Path)
    command.set_defaults(run=run_inspect)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    return run(parse(argv))


if __name__ == "__main__":
    sys.exit(main())
