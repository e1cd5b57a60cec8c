# SPDX-License-Identifier: Apache-2.0
"""The flags of the engine benchmark."""

import argparse
import json
from pathlib import Path

from benchmarks.spec_decode.models import MODES, SETS, modes_of
from benchmarks.spec_decode.results import IMPLEMENTATIONS, MAIN_CONTEXT, OURS
from benchmarks.spec_decode.traces import EQUAL, RECORDED, TEXTS


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.spec_decode.engine",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--site", action="append", required=True, metavar="NAME=PATH",
        help="where ours and base are: a folder of packages for PYTHONPATH, or a "
        "Python interpreter; give it for each name")  # fmt: skip
    add("--implementations", nargs="+", choices=IMPLEMENTATIONS,
        default=list(IMPLEMENTATIONS))  # fmt: skip
    add("--modes", nargs="+", choices=list(MODES), help="all that the shapes have")
    add("--num-speculative-tokens", type=int, nargs="*", default=[3, 5, 7, 11],
        metavar="K", help="of engines that draft as many in every step; none are "
        "measured if no number is given")  # fmt: skip
    add("--auto", type=int, metavar="K", help="also an engine of ours that chooses "
        "how much to draft, up to K; needs --trace")  # fmt: skip
    add("--trace", nargs="+", choices=TEXTS, default=[], help="replay what the bundled "
        "drafters had accepted of greedy or sampled text")  # fmt: skip
    add("--draft-tree", type=int, nargs="+", default=[], metavar="N",
        help="also engines of ours with draft trees of so many nodes, and with 0 "
        "--auto without trees, too; needs --trace")  # fmt: skip
    add("--shapes", choices=SETS, default=SETS[0], help="of the target and drafters")
    add("--max-num-seqs", type=int, default=64)
    add("--kv-cache-gib", type=float, default=5.0, help="KV cache of each engine")
    add("--engines-at-once", type=int, help="engines loaded together; what fits")
    add("--engine-args", type=json.loads, default={},
        help="more arguments of LLM, as JSON")  # fmt: skip
    add("--spec-args", type=json.loads, default={},
        help="more keys of the speculative config of ours, as JSON")  # fmt: skip
    add("--time-limit", type=float, default=570.0, help="seconds, then stop cleanly")
    add("--output", type=Path, help="results file; in results/<gpu>/ by default")
    add("--concurrency", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    add("--context", type=int, nargs="+", default=[MAIN_CONTEXT], metavar="L",
        help="tokens of a prompt")  # fmt: skip
    add("--output-len", type=int, default=256)
    add("--repeats", type=int, default=3)
    return parser


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Refuses inconsistent flags; fills in defaults that depend on other flags."""
    parser = make_parser()
    args = parser.parse_args(arguments)
    args.site = dict(site.partition("=")[::2] for site in args.site)
    for name, path in args.site.items():
        if name not in (OURS, "base") or not Path(path).exists():
            parser.error(f"--site {name}={path}: give ours=PATH or base=PATH")
    for name in args.implementations:
        if (site := OURS if name == OURS else "base") not in args.site:
            parser.error(f"{name} needs --site {site}=PATH")
    if (args.auto or args.draft_tree) and not args.trace:
        parser.error("--auto and --draft-tree need --trace: what is accepted")
    known = modes_of(args.shapes)
    args.modes = args.modes or known
    if missing := set(args.modes) - set(known):
        parser.error(f"the shapes {args.shapes} have no {', '.join(sorted(missing))}")
    args.acceptance = [RECORDED + text for text in args.trace] or [EQUAL]
    return args
