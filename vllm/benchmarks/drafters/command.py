# SPDX-License-Identifier: Apache-2.0
"""`vllm bench drafters`: does a drafter pay for a target, and is output the target's?

Without --model and --drafter it runs the bundled models of a clone. Exit status: 0; 1
if output differs from that without speculation by more than a tie of two tokens; 2 if
the arguments cannot be measured; 3 if an engine failed; 130 if it was cut off.
"""

import argparse
import json
import logging
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.benchmarks.datasets import add_dataset_parser
from vllm.config.drafter.files import check_exists
from vllm.engine.arg_utils import EngineArgs
from vllm.engine.config_error import in_one_line, parse_speculative_config
from vllm.platforms import current_platform
from vllm.utils.argparse_utils import FlexibleArgumentParser

if TYPE_CHECKING:
    from vllm.benchmarks.drafters.measure import Measurement
    from vllm.config import VllmConfig


def add_cli_args(parser: FlexibleArgumentParser) -> None:
    # Datasets and engines have flags of the same names: the engine's take precedence.
    parser.conflict_handler = "resolve"
    add_drafter_args(parser)
    # vLLM's --help lists groups of flags only.
    shown = argparse.ArgumentParser(usage=argparse.SUPPRESS, add_help=False)
    add_drafter_args(shown)
    parser.description = f"{parser.description}\n\n{shown.format_help()}"
    add_dataset_parser(parser)
    parser.set_defaults(dataset_name=None, num_prompts=None, backend="vllm")
    EngineArgs.add_cli_args(parser)
    # A cached prompt would be no load.
    parser.set_defaults(model=None, enable_prefix_caching=False)


def add_drafter_args(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("drafters").add_argument
    add("--drafter", nargs="+", action="extend", default=[], metavar="DRAFTER",
        type=parse_speculative_config,
        help="folder, hub id, or a speculative config as JSON; one that says how much "
        "to draft is measured so. Without --model: the bundled ones")  # fmt: skip
    add("--num-speculative-tokens", type=int, nargs="+", metavar="K",
        help="draft lengths to measure, too")  # fmt: skip
    add("--draft-tree", type=int, nargs="*", metavar="N",
        help="nodes of draft trees to measure, too")  # fmt: skip
    add("--concurrency", type=int, nargs="+", metavar="N",
        help="requests at a time; unset: 1 8 32; 1 8 with --quick on CPUs")  # fmt: skip
    add("--output-len", type=int, metavar="N", help="most tokens of an output; unset: "
        "128; 64 with --quick on CPUs")  # fmt: skip
    add("--ignore-eos", action="store_true",
        help="every output has as many tokens as --output-len allows")  # fmt: skip
    add("--repeats", type=int, default=3, metavar="N",
        help="rounds of each point, whose median counts; unset: 3")  # fmt: skip
    add("--quick", action="store_true", help="few prompts and settings")
    add("--json", type=Path, metavar="FILE",
        help="write all that was found, after each point")  # fmt: skip


def main(args: argparse.Namespace) -> None:
    try:
        words, bundle = sys.argv[sys.argv.index("drafters") + 1 :], None
        if args.model is None and not args.drafter:
            bundle = find_bundle()
            words = [*bundled_flags(bundle), *words]
            args = parse(words)
        fill_in(args)
        check(args)
        # Configs are made several times; the engines' logs have all warnings.
        logging.getLogger("vllm").setLevel(logging.ERROR)
        measured = prepare(args, bundle)
    except (ValueError, OSError, ImportError) as error:
        print(f"error: {in_one_line(error)}", file=sys.stderr)
        sys.exit(2)
    sys.exit(run(measured, args, engine_flags(words)))


def parse(words: Sequence[str]) -> argparse.Namespace:
    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    return parser.parse_args(words)


def run(measured: "Measurement", args: argparse.Namespace, flags: list[str]) -> int:
    """Measures, prints the report, also if it is cut off, and returns the exit status.

    Args:
        flags: further flags to serve the target with.
    """
    from vllm.benchmarks.drafters.processes import EngineError
    from vllm.benchmarks.drafters.report import Report

    report, status = Report(measured, args.model, flags), 0
    if args.json:
        measured.save = lambda: write(args.json, report.as_json())
    print(f"Logs of the engines: {measured.logs}", file=sys.stderr)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        measured.run()
    except EngineError as error:
        print(f"error: no speculation failed: {error}", file=sys.stderr)
        return 3
    except KeyboardInterrupt:
        status = 130
    measured.save()
    print("\n" + "\n\n".join([report.table(), report.verdict(), report.advice()]))
    return status or (1 if report.is_lossless is False else 3 * bool(measured.failed))


def write(file: Path, found: dict[str, Any]) -> None:
    """Writes JSON; a reader never finds half of it."""
    part = file.with_name(f"{file.name}.part")
    part.write_text(json.dumps(found, indent=1) + "\n")
    part.replace(file)


def find_bundle() -> Path:
    """The bundled models of the clone that this is installed from, or runs in.

    Raises:
        ValueError: there are none.
    """
    here = Path(__file__).resolve().parents[3] / "models"
    for folder in (Path("models"), here):
        if (folder / "held_out.json").is_file():
            return folder
    raise ValueError(
        "--model and --drafter are missing: name a target and its drafters, or run "
        "this in a clone of the repository, which has models to try it with."
    )


def bundled_flags(bundle: Path) -> list[str]:
    """Flags for a small run of the bundled models; the user's follow and override."""
    flags = ["--model", f"{bundle}/target", "--drafter"]
    # Nothing in a plain language model's files says that it is a drafter.
    flags.append(json.dumps({"model": f"{bundle}/draft", "method": "draft_model"}))
    flags += [f"{bundle}/{name}" for name in ("pard", "pard2", "eagle3", "peagle")]
    flags.append(json.dumps({"model": f"{bundle}/pard", "draft_tree": 15}))
    flags += ["--max-model-len=512", "--gpu-memory-utilization=0.3"]
    flags.append(f"--kv-cache-memory-bytes={1 << 28}")
    if current_platform.is_cpu():
        # Two bfloat16 logits of so small a model are often equal.
        flags += ["--dtype=float32", "-cc.mode=none"]
    return flags


def fill_in(args: argparse.Namespace) -> None:
    """Fills in unset flags."""
    is_small = args.quick and current_platform.is_cpu()
    usual = {
        "concurrency": [1, 8] if is_small else [1, 8, 32],
        "num_prompts": 8 if args.quick else 32,
        "output_len": 64 if is_small else 128,
    }
    for name, value in usual.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    args.max_num_seqs = args.max_num_seqs or max(args.concurrency)


def check(args: argparse.Namespace) -> None:
    """Checks what the engines' configs do not check.

    Raises:
        ValueError: the arguments cannot be measured.
    """
    positive = {
        "--concurrency": min(args.concurrency),
        "--num-prompts": args.num_prompts,
        "--output-len": args.output_len,
        "--repeats": args.repeats,
        "--num-speculative-tokens": min(args.num_speculative_tokens or [1]),
        "--draft-tree": min(args.draft_tree or [1]),
    }
    for flag, value in positive.items():
        if value < 1:
            raise ValueError(f"{flag} must be at least 1, not {value}.")
    if args.model is None:
        raise ValueError("--drafter needs --model: name the target that it drafts for.")
    if not args.drafter:
        raise ValueError("--model needs --drafter: name at least one to compare.")
    if not all(isinstance(spec, dict) for spec in args.drafter):
        raise ValueError("--drafter takes a folder, a hub id or a JSON object.")
    if args.dataset_path and args.dataset_name is None:
        raise ValueError("--dataset-path needs --dataset-name: custom for a file.")
    if args.speculative_config or args.spec_model or args.spec_method:
        raise ValueError("Name drafters by --drafter, which takes the same JSON.")
    if args.data_parallel_size > 1:
        raise ValueError("--data-parallel-size is not supported: leave it at 1.")
    if (most := max(args.concurrency)) > args.max_num_seqs:
        raise ValueError(
            f"--concurrency {most} needs as high a --max-num-seqs, not "
            f"{args.max_num_seqs}."
        )
    if args.json and not args.json.resolve().parent.is_dir():
        raise ValueError(f"{args.json}: there is no such folder.")
    check_exists("--model", args.model, args.revision, args.hf_token)


def prepare(args: argparse.Namespace, bundle: Path | None) -> "Measurement":
    """Reads all configs and prompts, before any weights load.

    Args:
        bundle: folder of the models, if they are the bundled ones.

    Raises:
        ValueError, OSError: an engine could not start, or prompts are too long.
    """
    from vllm.benchmarks.drafters.compare import NUM_LOGPROBS
    from vllm.benchmarks.drafters.measure import Measurement
    from vllm.benchmarks.drafters.plan import plan_sides
    from vllm.benchmarks.drafters.prompts import read_prompts
    from vllm.tokenizers import cached_tokenizer_from_config

    # Stats have times and acceptance, and logprobs tell ties from errors.
    stats = {"disable_log_stats": False, "max_logprobs": NUM_LOGPROBS}
    engine = replace(EngineArgs.from_cli_args(args), **stats)
    engine.logprobs_mode = "raw_logprobs"

    def resolve(spec: dict[str, Any] | None) -> "VllmConfig":
        # A copy, since resolving fills in unset keys.
        copy = None if spec is None else dict(spec)
        return replace(engine, speculative_config=copy).create_engine_config()

    target = resolve(None).model_config
    sides = plan_sides(args.drafter, args, resolve)
    tokenizer = cached_tokenizer_from_config(target)
    prompts = read_prompts(args, tokenizer, bundle, target.get_vocab_size())
    longest = max(map(len, prompts)) + args.output_len
    if longest > target.max_model_len:
        raise ValueError(
            f"A prompt and its output have {longest} tokens, the engine room for "
            f"{target.max_model_len}: lower --output-len, raise --max-model-len, or "
            "choose other prompts."
        )
    how = {"max_tokens": args.output_len, "ignore_eos": args.ignore_eos}
    # A round has two batches, and each prompt, or a few of them with --quick.
    fewest = 4 if args.quick else len(prompts)
    return Measurement(
        llm=vars(engine),
        sides=sides,
        prompts=prompts,
        sampling={"temperature": 0.0, **how},
        loads={load: max(fewest, 2 * load) for load in args.concurrency},
        repeats=args.repeats,
        logs=Path(tempfile.mkdtemp(prefix="vllm_bench_drafters_")),
    )


def engine_flags(words: Sequence[str]) -> list[str]:
    """The engine's flags in a command line, without the target."""
    parser = FlexibleArgumentParser(add_help=False, allow_abbrev=False)
    parser.conflict_handler = "resolve"
    add_drafter_args(parser)
    add_dataset_parser(parser)
    parser.add_argument("--model")
    known, rest = parser.parse_known_args(words)
    return [*rest, *["--trust-remote-code"] * known.trust_remote_code]
