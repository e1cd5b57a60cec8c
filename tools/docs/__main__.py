# SPDX-License-Identifier: Apache-2.0
"""`python -m tools.docs` renews what the docs take from code and results, and checks
links and names; `--check` renews nothing and fails where something is out of date."""

import argparse
import sys

from . import ROOT
from .generated import outdated
from .names import unknown_names


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.docs", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing")
    check = parser.parse_args().check
    old = [path.relative_to(ROOT) for path in outdated(write=not check)]
    problems = list(unknown_names())
    for path in old:
        print(f"{path}: {'out of date: run `make docs`' if check else 'renewed'}")
    for problem in problems:
        print(problem)
    return 1 if problems or (check and old) else 0


if __name__ == "__main__":
    sys.exit(main())
