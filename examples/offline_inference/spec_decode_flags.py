# SPDX-License-Identifier: Apache-2.0
"""Flags of the speculative decoding example, and the runs they ask for."""

import argparse
import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from spec_decode_prompts import add_prompt_flags, check_prompt_flags

MODELS = Path(__file__).resolve().parents[2] / "models"
NO_SPECULATION = "no speculation"
# The flag that names a method's drafter, and the bundled one for (sequential,
# parallel) drafting. A method without a flag needs no drafter.
METHODS: dict[str, tuple[str | None, tuple[str | None, str | None]]] = {
    "none": (None, (None, None)),
    "draft_model": ("draft_model", ("draft", "pard")),
    "eagle": ("eagle_dir", (None, None)),
    "eagle3": ("eagle_dir", ("eagle3", "peagle")),
}
# What users may take for a method, and how to ask for it.
MODES = {
    "pard": "--method draft_model --parallel-drafting",
    "pard2": "--method draft_model --parallel-drafting --draft-model PARD-2's",
    "peagle": "--method eagle3 --parallel-drafting",
}
DEFAULT_K = 7


class UsageError(ValueError):
    """Flags that do not fit together; the message says what to change."""


@dataclass(frozen=True)
class Drafting:
    """One configuration, which becomes one row of the table."""

    name: str
    method: str
    drafter: str | None = None
    num_tokens: int = 0
    parallel: bool = False

    def speculative_config(self) -> dict[str, Any] | None:
        if self.method == "none":
            return None
        config = {"method": self.method, "num_speculative_tokens": self.num_tokens}
        config |= {"model": self.drafter} if self.drafter else {}
        return config | ({"parallel_drafting": True} if self.parallel else {})


def number(kind: type, low: float, high: float = float("inf")) -> Callable[[str], Any]:
    """An argparse type: a number of a kind, from low to high."""

    def parse(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not low <= value <= high:
            noun = "a whole number" if kind is int else "a number"
            limits = f"from {low}" if high == float("inf") else f"from {low} to {high}"
            raise argparse.ArgumentTypeError(f"give {noun} {limits}, not {text!r}")
        return value

    return parse


def known_method(text: str) -> str:
    """An argparse type: a key of METHODS."""
    if text in METHODS:
        return text
    asked = MODES.get(re.sub("[-_]", "", text).lower())
    remedy = f"write {asked}" if asked else f"choose from {', '.join(METHODS)}"
    raise argparse.ArgumentTypeError(f"{text!r} is no method: {remedy}")


def make_parser(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_model_flags(parser.add_argument_group("models"))
    add_prompt_flags(parser)
    add_generation_flags(parser.add_argument_group("generation"))
    add_engine_flags(parser.add_argument_group("engine"))
    return parser


def add_model_flags(group: Any) -> None:
    add = group.add_argument
    names = f"{{{','.join(METHODS)}}}"
    add("--method", type=known_method, metavar=names, help="run this method only")
    add("--model-dir", help="target model (default: the bundled one)")
    add("--draft-model", help="draft model or PARD model")
    add("--eagle-dir", help="EAGLE, EAGLE-3 or P-EAGLE head")
    add(
        "--num-spec-tokens",
        type=number(int, 1),
        default=None,
        help=f"tokens drafted at a time, K (default: {DEFAULT_K})",
    )
    add("--parallel-drafting", action="store_true", help="draft all K in one pass")
    add("--no-baseline", action="store_true", help="leave out 'no speculation'")
    add(
        "--bundle",
        type=Path,
        default=MODELS,
        help="folder with the bundled target, draft, pard, eagle3 and peagle",
    )


def add_generation_flags(group: Any) -> None:
    add = group.add_argument
    add("--num-prompts", type=number(int, 1), default=8)
    add("--output-len", type=number(int, 1), default=64, help="tokens of each output")
    add("--temp", type=number(float, 0), default=0.0, help="0 is greedy")
    add("--top-p", type=number(float, 1e-6, 1), default=1.0)
    add("--seed", type=number(int, 0), default=0)
    add("--print-output", action="store_true", help="print prompts and outputs")
    add("--json", type=Path, metavar="FILE", help="write the table as JSON too")


def add_engine_flags(group: Any) -> None:
    add, share = group.add_argument, number(float, 1e-6, 1)
    add("--max-num-seqs", type=number(int, 1), default=8)
    add("--tp", type=number(int, 1), default=1, help="tensor parallel size")
    add(
        "--enforce-eager",
        action=argparse.BooleanOptionalAction,
        help="no torch.compile, no CUDA graphs (default: on a CPU only)",
    )
    add("--max-model-len", type=number(int, 2), help="default: the target's own")
    add(
        "--gpu-memory-utilization",
        type=share,
        help="share of the memory (default: 0.3 for the bundled models and on a "
        "CPU, else vLLM's)",
    )
    add("--dtype", help="default: float32 for the bundled target on a CPU, else auto")


def checked_plan(args: argparse.Namespace) -> list[Drafting]:
    """What to run; fills in the defaults of `args`.

    Raises:
        UsageError, PromptError: what a user has to change, seen without an engine.
    """
    check_prompt_flags(args)
    if args.json and not args.json.parent.is_dir():
        raise UsageError(f"--json: there is no folder {args.json.parent}.")
    plan = plan_of(args)
    fill_in_defaults(args)
    for path in [args.model_dir, *(drafting.drafter for drafting in plan)]:
        check_model(path)
    return plan


def plan_of(args: argparse.Namespace) -> list[Drafting]:
    if args.method is None:
        return suite(args)
    chosen = single(args)
    baseline = [Drafting(NO_SPECULATION, "none")]
    if chosen.method == "none":
        return baseline
    return [chosen] if args.no_baseline else [*baseline, chosen]


def suite(args: argparse.Namespace) -> list[Drafting]:
    """All bundled models. A flag that picks one model is refused."""
    flags = ("model_dir", "draft_model", "eagle_dir", "parallel_drafting")
    for flag in flags:
        if getattr(args, flag):
            raise UsageError(
                f"{as_flag(flag)} needs --method: one of {', '.join(METHODS)}."
            )
    if args.no_baseline:
        raise UsageError("--no-baseline needs --method.")
    drafters = [
        ("draft model", "draft_model", "draft", False),
        ("PARD", "draft_model", "pard", True),
        ("PARD-2", "draft_model", "pard2", True),
        ("EAGLE-3", "eagle3", "eagle3", False),
        ("P-EAGLE", "eagle3", "peagle", True),
    ]
    return [Drafting(NO_SPECULATION, "none")] + [
        Drafting(
            name,
            method,
            str(args.bundle / model),
            args.num_spec_tokens or DEFAULT_K,
            parallel,
        )
        for name, method, model, parallel in drafters
    ]


def single(args: argparse.Namespace) -> Drafting:
    """The one configuration that `--method` asks for."""
    flag, bundled = METHODS[args.method]
    for other in {"draft_model", "eagle_dir"} - {flag}:
        if getattr(args, other):
            instead = f"give {as_flag(flag)}" if flag else "leave it out"
            raise UsageError(
                f"--method {args.method} takes no {as_flag(other)}: {instead}."
            )
    if flag is None:
        for unused in ("parallel_drafting", "num_spec_tokens"):
            if getattr(args, unused):
                raise UsageError(
                    f"{as_flag(unused)} needs a drafter: choose another --method than "
                    f"{args.method}, or leave it out."
                )
        return Drafting(args.method, args.method)
    own = bundled[args.parallel_drafting] if args.model_dir is None else None
    drafter = getattr(args, flag) or (own and str(args.bundle / own))
    if drafter is None:
        raise UsageError(f"--method {args.method} needs {as_flag(flag)}.")
    parallel = args.parallel_drafting
    name = f"{args.method}{' (parallel)' if parallel else ''}"
    return Drafting(
        name, args.method, drafter, args.num_spec_tokens or DEFAULT_K, parallel
    )


def as_flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def fill_in_defaults(args: argparse.Namespace) -> None:
    bundled = args.model_dir is None
    if bundled:
        args.model_dir = str(args.bundle / "target")
    if args.dtype is None:
        # Two bfloat16 logits are often equal, and then the order of a sum decides. On
        # a GPU float32 would not help: its attention kernels multiply in TF32.
        args.dtype = "float32" if bundled and runs_on_cpu() else "auto"
    if args.gpu_memory_utilization is None and (bundled or runs_on_cpu()):
        args.gpu_memory_utilization = 0.3
    if args.enforce_eager is None:
        args.enforce_eager = runs_on_cpu()


def check_model(path: str | None) -> None:
    """Raises UsageError for what is neither a checkpoint here nor a hub's id."""
    if path is None or (Path(path) / "config.json").is_file():
        return
    if Path(path).exists():
        raise UsageError(f"{path} is not a checkpoint: it has no config.json.")
    is_id = re.fullmatch(r"[\w.-]+/[\w.-]+", path) and not path.startswith(".")
    if not is_id or Path(path).parent.is_dir():
        raise UsageError(f"There is no checkpoint {path}: check the path.")


def runs_on_cpu() -> bool:
    """As vLLM decides it: by the version that is installed."""
    try:
        return "cpu" in version("vllm")
    except PackageNotFoundError:
        return True  # the base's CPU wheel has another name
