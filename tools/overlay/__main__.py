# SPDX-License-Identifier: Apache-2.0
"""Commands on the overlay: `python -m tools.overlay refresh | show | check | lock`."""

import argparse
import sys
from pathlib import Path
from zipfile import ZipFile

from .base import DEVICES, ROOT, find_wheel, local_version, pinned_base, target_device
from .check import check
from .command import run
from .compose import compose
from .edits import SUFFIX
from .lock import touched, write_lock
from .native import build
from .refresh import refresh
from .show import show
from .tree import Release, edit_files

EDITABLE = ROOT / "build" / "editable"


def compose_editable() -> Path:
    """Composes the tree that an editable install imports; additions are links."""
    base = pinned_base(target_device())
    compose(find_wheel(base), EDITABLE, version=local_version(base), link=True)
    if base.device == "cpu":
        build(EDITABLE)
    return EDITABLE


def run_compose(args: argparse.Namespace) -> int:
    print(f"Composed {compose_editable()}")
    return 0


def run_refresh(args: argparse.Namespace) -> int:
    with ZipFile(args.wheel) as wheel:
        release = Release(wheel)
        written = refresh(release, args.tree)
        write_lock(release, touched(edit_files()))
    print("\n".join(written) or "The composed tree has no change that is not an edit.")
    return 0


def run_show(args: argparse.Namespace) -> int:
    wanted = [str(path).removesuffix(SUFFIX) for path in args.paths]
    with ZipFile(args.wheel) as wheel:
        release = Release(wheel)
        for edit in edit_files():
            if not wanted or any(edit.path.endswith(path) for path in wanted):
                for line in show(release.source(edit.path), edit, sys.stdout.isatty()):
                    print(line)
                print()
    return 0


def run_check(args: argparse.Namespace) -> int:
    problems = check(args.wheel)
    print("\n".join(problems) or "The overlay is in order.")
    return int(bool(problems))


def run_lock(args: argparse.Namespace) -> int:
    with ZipFile(args.wheel) as wheel:
        keys = touched(edit_files())
        write_lock(Release(wheel), keys)
    print(f"edits.lock: {len(keys)} members of {args.wheel.name}")
    return 0


def run_rebase(args: argparse.Namespace) -> int:
    from .rebase import rebase  # needs packaging, which check and lock do without

    report = rebase(args.version, args.device or target_device(), args.other)
    if args.output:
        args.output.write_text(report.text)
    else:
        print(report.text)
    return int(args.strict and not report.clean)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m tools.overlay", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="command")

    def command(name: str, run, text: str) -> argparse.ArgumentParser:
        found = commands.add_parser(name, help=text)
        found.set_defaults(run=run)
        found.add_argument("--wheel", type=Path, help="the release's wheel, at hand")
        return found

    again = command(
        "refresh", run_refresh, "make edits of changes of the composed tree"
    )
    again.add_argument("--tree", type=Path, default=EDITABLE, help="composed tree")
    shown = command("show", run_show, "print edits within the lines around them")
    shown.add_argument("paths", nargs="*", type=Path, help="of these files; else all")
    command("check", run_check, "list all that is wrong with the overlay")
    command("lock", run_lock, "lock the members that our lines were written for")
    command("compose", run_compose, "compose the tree of an editable install again")
    other = command("rebase", run_rebase, "what another release would change")
    other.add_argument("--version", required=True, help="the other release")
    other.add_argument("--other", type=Path, help="its wheel, at hand")
    other.add_argument("--device", choices=DEVICES, help="default: this machine's")
    other.add_argument("--output", type=Path, help="Markdown file to write")
    other.add_argument(
        "--strict", action="store_true", help="exit 1 if there is anything to do"
    )
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)

    def with_wheel(args: argparse.Namespace) -> int:
        args.wheel = args.wheel or find_wheel(pinned_base(target_device()))
        return args.run(args)

    return run(argparse.Namespace(**vars(args) | {"run": lambda _: with_wheel(args)}))


if __name__ == "__main__":
    sys.exit(main())
