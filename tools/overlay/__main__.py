# SPDX-License-Identifier: Apache-2.0
"""Commands on the overlay: `python -m tools.overlay refresh | show | check …`."""

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from difflib import unified_diff
from pathlib import Path
from zipfile import ZipFile

from packaging.version import Version

from .base import (
    DEVICES,
    Base,
    OverlayError,
    fetch,
    find_wheel,
    newest_version,
    pinned_base,
    pinned_wheel,
    run_command,
    target_device,
)
from .check import check
from .compose import EDITABLE, compose_for
from .edits import SUFFIX, composed
from .lock import write_lock
from .rebase import rebase
from .refresh import refresh
from .tree import Release, edit_files


@contextmanager
def pinned_release() -> Iterator[Release]:
    with ZipFile(pinned_wheel()) as wheel:
        yield Release(wheel)


def run_compose(args: argparse.Namespace) -> None:
    compose_for(target_device(), EDITABLE, link=True)
    print(f"Composed {EDITABLE}")


def run_refresh(args: argparse.Namespace) -> None:
    with pinned_release() as release:
        written = refresh(release, EDITABLE)
        write_lock(release)
    print("\n".join(written) or "Nothing was changed by hand.")


def run_show(args: argparse.Namespace) -> None:
    paths = tuple(str(path).removesuffix(SUFFIX) for path in args.paths)
    shown = [e for e in edit_files() if not paths or e.path.endswith(paths)]
    if not shown:
        raise OverlayError(f"No edit of {', '.join(paths)}: vLLM's file is as it was.")
    with pinned_release() as release:
        for edit in shown:
            source = release.source(edit.path)
            ours = composed(source, edit.hunks()).splitlines(keepends=True)
            names = f"vLLM's {edit.path}", edit.path
            print(*unified_diff(source.lines, ours, *names), sep="", end="")


def run_check(args: argparse.Namespace) -> int:
    found = check(pinned_wheel())
    print("\n".join(found) or "The overlay is in order.")
    return int(bool(found))


def run_lock(args: argparse.Namespace) -> None:
    with pinned_release() as release:
        print(f"Locked {write_lock(release)} members of vLLM.")


def run_rebase(args: argparse.Namespace) -> None:
    device = args.device or target_device()
    base = pinned_base(device)
    if args.version == base.version and args.write:
        raise OverlayError(
            f"base.toml pins {base.version} already: hunks are moved before that."
        )
    other = args.wheel or fetch(Base(base.project, args.version, device, sha256=None))
    print(rebase(find_wheel(base), other, write=args.write))


def run_newest(args: argparse.Namespace) -> int:
    base = pinned_base(target_device())
    args.version = newest_version(base.project)
    if Version(args.version) <= Version(base.version):
        print(f"vLLM {base.version} is the newest release.")
        return 0
    run_rebase(args)
    print(f"This tree is on vLLM {base.version}: move it as docs/rebasing.md says.")
    return 1


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m tools.overlay", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="command")

    def add(name: str, act: Callable, text: str) -> argparse.ArgumentParser:
        found = commands.add_parser(name, help=text)
        found.set_defaults(run=act)
        return found

    add("refresh", run_refresh, "make edit files of what was changed by hand")
    hunks = add("show", run_show, "print the edits as a diff of vLLM's files")
    hunks.add_argument("paths", nargs="*", type=Path, help="of files; else all")
    add("check", run_check, "list all that is wrong with the overlay")
    add("lock", run_lock, "lock the members that our lines were written for")
    add("compose", run_compose, "compose the tree of an editable install again")
    other = add("rebase", run_rebase, "report what another release would change")
    other.add_argument("--version", required=True, help="the other release")
    other.add_argument("--wheel", type=Path, help="its wheel, at hand")
    other.add_argument("--device", choices=DEVICES, help="default: this machine's")
    other.add_argument("--write", action="store_true", help="move hunks to its lines")
    newest = add("newest", run_newest, "the same of the newest; 1 if there is one")
    newest.set_defaults(wheel=None, device=None, write=False)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    return run_command(parse(argv))


if __name__ == "__main__":
    sys.exit(main())
