# SPDX-License-Identifier: Apache-2.0
"""Flags of the engine benchmark."""

import argparse
import json
from pathlib import Path

from benchmarks.spec_decode.plan import ACCEPTANCES, EQUAL, RECORDED
from benchmarks.spec_decode.results import IMPLEMENTATIONS, MAIN_CONTEXT, OURS
from benchmarks.spec_decode.shapes import MODES, SETS, modes_of


def add_site_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--site",
        action="append",
        required=True,
        metavar="NAME=PATH",
        help="where ours and base are: a folder of packages for PYTHONPATH, or a "
        "Python interpreter; give it for each name",
    )


def parse_sites(parser: argparse.ArgumentParser, sites: list[str]) -> dict[str, str]:
    found = dict(site.partition("=")[::2] for site in sites)
    for name, path in found.items():
        if name not in (OURS, "base") or not Path(path).exists():
            parser.error(f"--site {name}={path}: give ours=PATH or base=PATH")
    return found


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.spec_decode.engine",
        description=__doc__,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add_site_flag(parser)
    _add_matrix(parser)
    _add_limits(parser)
    args = parser.parse_args(arguments)
    args.site = parse_sites(parser, args.site)
    check_sites(parser, args)
    if args.trace:
        labels = {text: label for label, text in RECORDED.items()}
        args.acceptance = [labels[text] for text in args.trace]
    elif args.draft_tree or args.adaptive:
        parser.error(
            "--draft-tree and --adaptive need --trace: what they go by is recorded"
        )
    args.modes = args.modes or modes_of(args.shapes)
    if missing := set(args.modes) - set(modes_of(args.shapes)):
        parser.error(f"the shapes {args.shapes} have no {', '.join(sorted(missing))}")
    return args


def check_sites(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    for name in args.implementations:
        if (site := OURS if name == OURS else "base") not in args.site:
            parser.error(f"{name} needs --site {site}=PATH")


def _add_matrix(parser: argparse.ArgumentParser) -> None:
    def many(*flags: str, **more) -> None:
        parser.add_argument(*flags, nargs="+", **more)

    many("--implementations", choices=IMPLEMENTATIONS, default=list(IMPLEMENTATIONS))
    many("--modes", choices=list(MODES), help="all that the shapes have, by default")
    many("--num-speculative-tokens", type=int, default=[3, 5, 7, 11])
    parser.add_argument(
        "--auto",
        type=int,
        metavar="K",
        help="also an engine of ours that chooses how much to draft, up to K; its "
        "points are those of --acceptance by-position",
    )
    many("--concurrency", type=int, default=[1, 2, 4, 8, 16, 32, 64])
    many(
        "--acceptance",
        choices=ACCEPTANCES,
        default=[EQUAL],
        help="acceptance: equal lengths for all, or the same by position (ours alone, "
        "to compare lengths of draft)",
    )
    many(
        "--trace",
        choices=list(RECORDED.values()),
        default=[],
        help="replay what the bundled drafters had accepted of greedy or sampled text, "
        "instead of --acceptance",
    )
    many(
        "--draft-tree",
        type=int,
        default=[],
        metavar="N",
        help="also engines of ours with draft trees of so many nodes, for modes that "
        "draft in one pass; needs --trace",
    )
    parser.add_argument(
        "--adaptive",
        action="store_true",
        help="also engines with enable_adaptive_verification, ours and Runner V2's; "
        "needs --trace, whose confidence it reads",
    )
    parser.add_argument(
        "--share-engines",
        action="store_true",
        help="engines of ours that differ only in how much they draft are one engine, "
        "which is told how much before each round",
    )
    parser.add_argument("--repeats", type=int, default=3)
    many(
        "--context",
        "--prompt-len",
        type=int,
        default=[MAIN_CONTEXT],
        metavar="L",
        help="tokens of a prompt",
    )
    parser.add_argument("--output-len", type=int, default=256)
    many("--profile", type=int, default=[], help="profile at these concurrencies too")
    parser.add_argument("--profile-steps", type=int, default=20)


def _add_limits(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--shapes", choices=SETS, default=SETS[0], help="of the target and drafters")
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add("--gpu", help="name of the results folder; detected by default")
    add(
        "--output", type=Path, help="results file; results/<gpu>/engine.json by default"
    )
    add("--engines-at-once", type=int, help="engines loaded together; what fits")
    add("--max-num-seqs", type=int, default=64)
    add("--kv-cache-gib", type=float, default=5.0, help="KV cache of each engine")
    add("--time-limit", type=float, default=570.0, help="seconds, then stop cleanly")
    add("--start-timeout", type=float, default=400.0, help="seconds for an engine")
    add("--note", help="circumstances, kept with the results")
    add(
        "--engine-args",
        type=json.loads,
        default={},
        help="more arguments of LLM, as JSON",
    )
