# SPDX-License-Identifier: Apache-2.0
"""Commands on the overlay: `python -m tools.overlay refresh | show | check | lock`."""

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from zipfile import ZipFile

from .base import (
    DEVICES,
    Base,
    fetch,
    find_wheel,
    load_config,
    pinned_base,
    target_device,
)
from .check import check
from .command import run
from .compose import EDITABLE, compose_for
from .edits import SUFFIX, EditFile, shown
from .lock import write_lock
from .members import Source
from .rebase import rebase
from .refresh import refresh
from .tree import Release, edit_files

COLOURS = {"+": "\033[32m{}\033[0m", "-": "\033[31m{}\033[0m", "@": "\033[36m{}\033[0m"}


@contextmanager
def pinned_release() -> Iterator[Release]:
    with ZipFile(find_wheel(pinned_base(target_device()))) as wheel:
        yield Release(wheel)


def run_compose(args: argparse.Namespace) -> int:
    compose_for(target_device(), EDITABLE, link=True)
    print(f"Composed {EDITABLE}")
    return 0


def run_refresh(args: argparse.Namespace) -> int:
    with pinned_release() as release:
        written = refresh(release, EDITABLE)
        write_lock(release)
    print("\n".join(written) or "Nothing was changed by hand.")
    return 0


def run_show(args: argparse.Namespace) -> int:
    paths = tuple(str(path).removesuffix(SUFFIX) for path in args.paths)
    with pinned_release() as release:
        for edit in edit_files():
            if not paths or edit.path.endswith(paths):
                put(f"{edit.path}{SUFFIX}\n")
                show(release.source(edit.path), edit)
    return 0


def show(source: Source, edit: EditFile) -> None:
    for section in edit.sections:
        print("".join(section.head), end="")
        for hunk in section.hunks:
            for line in [hunk.header, *shown(source, hunk)]:
                put(line)
        print()


def put(line: str) -> None:
    """Prints a line; on a terminal in the colour of its mark."""
    colour = COLOURS.get(line[0], "{}") if sys.stdout.isatty() else "{}"
    print(colour.format(line.rstrip("\n")))


def run_check(args: argparse.Namespace) -> int:
    found = check(find_wheel(pinned_base(target_device())))
    print("\n".join(found) or "The overlay is in order.")
    return int(bool(found))


def run_lock(args: argparse.Namespace) -> int:
    with pinned_release() as release:
        print(f"Locked {write_lock(release)} members of vLLM.")
    return 0


def run_rebase(args: argparse.Namespace) -> int:
    device = args.device or target_device()
    project = load_config()[device]["project"]
    other = args.wheel or fetch(Base(project, args.version, device, sha256=None))
    print(rebase(find_wheel(pinned_base(device)), other, write=args.write))
    return 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m tools.overlay", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="command")

    def add(name: str, act: Callable, text: str) -> argparse.ArgumentParser:
        found = commands.add_parser(name, help=text)
        found.set_defaults(run=act)
        return found

    add("refresh", run_refresh, "make edit files of what was changed by hand")
    hunks = add("show", run_show, "print hunks within the lines that they stand in")
    hunks.add_argument("paths", nargs="*", type=Path, help="of files; else all")
    add("check", run_check, "list all that is wrong with the overlay")
    add("lock", run_lock, "lock the members that our lines were written for")
    add("compose", run_compose, "compose the tree of an editable install again")
    other = add("rebase", run_rebase, "report what another release would change")
    other.add_argument("--version", required=True, help="the other release")
    other.add_argument("--wheel", type=Path, help="its wheel, at hand")
    other.add_argument("--device", choices=DEVICES, help="default: this machine's")
    other.add_argument("--write", action="store_true", help="move hunks to its lines")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    return run(parse(argv))


if __name__ == "__main__":
    sys.exit(main())
