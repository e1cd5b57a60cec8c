# SPDX-License-Identifier: Apache-2.0
"""`vllm bench drafters`: does a drafter pay for a target, and is output the target's?

Without --model and --drafter it runs the bundled models of a clone. Exit status: 0; 1
if output differs from that without speculation by more than a tie of two tokens; 2 if
the arguments cannot be measured; 3 if an engine failed.
"""

import argparse
import json
import logging
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.benchmarks.datasets import add_dataset_parser
from vllm.benchmarks.drafters.collection import paused_collection
from vllm.config.drafter.files import check_exists
from vllm.engine.arg_utils import EngineArgs
from vllm.engine.config_error import in_one_line, parse_speculative_config
from vllm.platforms import current_platform
from vllm.utils.argparse_utils import FlexibleArgumentParser

# Requests in a round at low concurrency, with --quick.
QUICK_REQUESTS, QUICK_CPU_REQUESTS = 4, 3
SEEDED_CPU_LEN = 48  # tokens of seeded outputs, which are only checked, with --quick
# At a time, on a CPU: without speculation, the one measured, and the next as it starts.
ENGINES_IN_TURNS = 3

if TYPE_CHECKING:
    from vllm.benchmarks.drafters.measure import Job
    from vllm.config import VllmConfig


def add_cli_args(parser: FlexibleArgumentParser) -> None:
    # Datasets and engines have flags of the same names: the engine's take precedence.
    parser.conflict_handler = "resolve"
    add_own_args(parser)
    EngineArgs.add_cli_args(parser)
    # A cached prompt would be no load.
    parser.set_defaults(model=None, enable_prefix_caching=False)
    parser.set_defaults(gpu_memory_utilization=None)  # `fill_in` does


def add_own_args(parser: argparse.ArgumentParser) -> None:
    """Adds all flags but the engine's."""
    add_dataset_parser(parser)
    parser.set_defaults(dataset_name=None, num_prompts=None, backend="vllm")
    add = parser.add_argument_group("drafters").add_argument
    add("--drafter", nargs="+", action="extend", default=[], metavar="DRAFTER",
        type=parse_speculative_config,
        help="folder, hub id, or a speculative config as JSON; one that says how much "
        "to draft is measured as it is. Without --model: the bundled ones")  # fmt: skip
    add("--num-speculative-tokens", type=int, nargs="+", metavar="K",
        help='fixed draft lengths to measure beside "auto"')  # fmt: skip
    add("--draft-tree", type=int, nargs="*", metavar="N",
        help='nodes of fixed draft trees to measure beside "auto"')  # fmt: skip
    add("--concurrency", type=int, nargs="+", metavar="N",
        help="requests at a time; unset: 1 8 32; 1 8 with --quick on CPUs")  # fmt: skip
    add("--output-len", type=int, metavar="N", help="most tokens of an output; unset: "
        "the dataset's own lengths, and 128 without a dataset")  # fmt: skip
    add("--ignore-eos", action="store_true",
        help="every output has as many tokens as --output-len allows")  # fmt: skip
    add("--repeats", type=int, metavar="N", help="rounds of each point, of which the "
        "fastest counts; unset: 3, with --quick 2, and 1 on CPUs")  # fmt: skip
    add("--quick", action="store_true", help="few prompts, settings and rounds")
    add("--json", type=Path, metavar="FILE", help="write all that was found")
    add("--plot", type=Path, metavar="FILE", help="write a picture, such as a PNG")


def main(args: argparse.Namespace) -> None:
    from vllm.benchmarks.drafters.processes import import_ahead

    try:
        words, bundle = sys.argv[sys.argv.index("drafters") + 1 :], None
        if args.model is None and not args.drafter:
            bundle = find_bundle()
            words = [*bundled_flags(bundle), *words]
            args = parse(words)
        fill_in(args)
        check(args)
        warnings = NewWarnings(logging.getLogger("vllm"))
        with paused_collection():
            import_ahead()
            with warnings:
                job = prepare(args, bundle, warnings)
    except (ValueError, OSError, ImportError) as error:
        print(f"error: {in_one_line(error)}", file=sys.stderr)
        sys.exit(2)
    sys.exit(run(job, args, engine_flags(words)))


class NewWarnings:
    """Filters a logger's handlers: each warning is shown once, and nothing while
    `is_silent`. Configs are made several times; engines have logs of their own."""

    def __init__(self, log: logging.Logger):
        self.log, self.seen = log, set[str]()
        self.is_silent = False

    def __enter__(self) -> "NewWarnings":
        for handler in self.log.handlers:
            handler.addFilter(self.is_new)
        return self

    def __exit__(self, *_: Any) -> None:
        for handler in self.log.handlers:
            handler.removeFilter(self.is_new)

    def is_new(self, record: logging.LogRecord) -> bool:
        text, known = record.getMessage(), len(self.seen)
        self.seen.add(text)
        is_warning = record.levelno >= logging.WARNING and not self.is_silent
        return is_warning and len(self.seen) > known


def parse(words: Sequence[str]) -> argparse.Namespace:
    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    return parser.parse_args(words)


def run(job: "Job", args: argparse.Namespace, flags: Sequence[str]) -> int:
    """Measures, prints the report, and returns the exit status.

    Args:
        flags: further flags to serve the target with.
    """
    from vllm.benchmarks.drafters.measure import Measurement
    from vllm.benchmarks.drafters.processes import EngineError
    from vllm.benchmarks.drafters.report import Report, draw

    print(f"What engines say: {job.logs}", file=sys.stderr)
    measured = Measurement(job)
    try:
        measured.run()
    except EngineError as error:
        print(f"error: no speculation failed: {error}", file=sys.stderr)
        return 3
    report = Report(measured, args.model, flags)
    parts = [report.table(), report.plot(), report.verdict(), report.advice()]
    print("\n" + "\n\n".join(parts))
    if args.json:
        args.json.write_text(json.dumps(report.as_json(), indent=1) + "\n")
    if args.plot:
        draw(report, args.plot)
    for name, why in measured.failed.items():
        print(f"error: {name} failed: {why}", file=sys.stderr)
    if not report.is_lossless:
        return 1
    return 3 if measured.failed else 0


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
    # Whether "auto" is measured without fixed lengths, unless flags name some.
    args.auto_alone = is_small
    # Two engines take turns, since other load on a CPU comes and goes.
    args.in_turns = is_small
    usual = {
        "concurrency": [1, 8] if is_small else [1, 8, 32],
        "num_prompts": 8 if args.quick else 32,
        # Turns meet the same other load, so one round of each is enough.
        "repeats": 1 if is_small else 2 if args.quick else 3,
        # On a CPU an engine takes this share of all memory, mostly for its KV cache.
        "gpu_memory_utilization": EngineArgs.gpu_memory_utilization
        / (ENGINES_IN_TURNS if args.in_turns else 1),
    }
    if args.dataset_name is None:
        usual["output_len"] = 128
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
        "--output-len": 1 if args.output_len is None else args.output_len,
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
        raise ValueError(
            "--dataset-path needs --dataset-name: custom, if it is a file of prompts."
        )
    if args.speculative_config or args.spec_model or args.spec_method:
        raise ValueError("Name drafters by --drafter, which takes the same JSON.")
    if args.data_parallel_size > 1:
        raise ValueError("--data-parallel-size is not supported: leave it at 1.")
    if args.use_fp64_gumbel:
        raise ValueError(
            "--use-fp64-gumbel samples with noise that is not recomputed: unset it."
        )
    if max(args.concurrency) > args.max_num_seqs:
        raise ValueError(
            f"--concurrency {max(args.concurrency)} needs as high a --max-num-seqs, "
            f"not {args.max_num_seqs}."
        )
    if args.plot and find_spec("matplotlib") is None:
        raise ValueError("--plot needs matplotlib: pip install matplotlib.")
    for file in filter(None, (args.json, args.plot)):
        if not file.absolute().parent.is_dir():
            raise ValueError(f"{file}: there is no such folder.")
    check_exists("--model", args.model, args.revision, args.hf_token)


def prepare(
    args: argparse.Namespace, bundle: Path | None, warnings: NewWarnings
) -> "Job":
    """Reads all configs and prompts, before any weights load.

    Args:
        bundle: folder of the models, if they are the bundled ones.
        warnings: silenced for the target's own config, which concerns no drafter.

    Raises:
        ValueError, OSError: an engine could not start, or prompts are too long.
    """
    from vllm.benchmarks.drafters.compare import NUM_LOGPROBS
    from vllm.benchmarks.drafters.measure import Job
    from vllm.benchmarks.drafters.plan import plan_engines
    from vllm.benchmarks.drafters.prompts import read_requests
    from vllm.tokenizers import cached_tokenizer_from_config

    # Stats have the acceptance, and logprobs tell ties from errors.
    asked = {"max_logprobs": NUM_LOGPROBS, "logprobs_mode": "raw_logprobs"}
    engine_args = EngineArgs.from_cli_args(args)
    engine_args = replace(engine_args, disable_log_stats=False, **asked)

    def resolve(spec: dict[str, Any] | None) -> "VllmConfig":
        # A copy, since resolving fills in unset keys.
        given = None if spec is None else dict(spec)
        return replace(engine_args, speculative_config=given).create_engine_config()

    warnings.is_silent = True
    target = resolve(None).model_config
    warnings.is_silent = False
    plans = plan_engines(args.drafter, args, resolve)
    tokenizer = cached_tokenizer_from_config(target)
    requests = read_requests(args, tokenizer, bundle, target.get_vocab_size())
    longest = max(len(request.prompt) + request.max_tokens for request in requests)
    if longest > target.max_model_len:
        raise ValueError(
            f"A prompt and its output have {longest} tokens, the engine room for "
            f"{target.max_model_len}: lower --output-len, raise --max-model-len, or "
            "choose other prompts."
        )
    logs = Path(tempfile.mkdtemp(prefix="vllm_bench_drafters_"))
    return Job(
        engine_args=engine_args,
        plans=plans,
        requests=requests,
        loads=round_sizes(args, len(requests)),
        repeats=args.repeats,
        seeded_len=SEEDED_CPU_LEN if args.in_turns else None,
        ignore_eos=args.ignore_eos,
        logs=logs,
        tokenizer=tokenizer,
    )


def round_sizes(args: argparse.Namespace, num_requests: int) -> dict[int, int]:
    """Number of requests in a round, by concurrency."""
    fewest, each = num_requests, 2
    if args.in_turns:
        # The engine without speculation takes turns: even few requests take long.
        fewest, each = min(QUICK_CPU_REQUESTS, num_requests), 1
    elif args.quick:
        fewest = min(QUICK_REQUESTS, num_requests)
    return {load: max(fewest, each * load) for load in args.concurrency}


def engine_flags(words: Sequence[str]) -> list[str]:
    """The engine's flags in a command line, without the target."""
    own = FlexibleArgumentParser(add_help=False, allow_abbrev=False)
    add_own_args(own)
    own.add_argument("--model")
    known, rest = own.parse_known_args(words)
    return [*rest, *["--trust-remote-code"] * known.trust_remote_code]
