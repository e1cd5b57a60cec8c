# SPDX-License-Identifier: Apache-2.0
r"""Offline speculative decoding: answers prompts, and counts the accepted drafts.

Without arguments the bundled target continues Python, with PARD as its drafter. With
a model and a drafter, on MT-Bench from the hub or on a file of questions:

    python spec_decode.py --model-dir Qwen/Qwen3-32B --draft-model Qwen/Qwen3-1.7B \
        --num-spec-tokens 3 --dataset-name hf --dataset-path philschmid/mt-bench \
        --num-prompts 80 --temp 1.0
    python spec_decode.py --model-dir meta-llama/Llama-3.1-8B-Instruct \
        --draft-model amd/PARD-Llama-3.2-1B --dataset-name gsm8k \
        --dataset-path gsm8k_test.jsonl --num-prompts 200

The engine's flags are those of `vllm serve`; `--help=all` explains all. What drafters
gain, and whether output is the target's, `vllm bench drafters` measures.
"""

import argparse
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from vllm import LLM, EngineArgs, RequestOutput, SamplingParams
from vllm.benchmarks.datasets import add_dataset_parser, get_samples
from vllm.benchmarks.drafters.prompts import encode_chat
from vllm.benchmarks.drafters.questions import FIELDS, read_questions
from vllm.utils.argparse_utils import FlexibleArgumentParser

MODELS = Path(__file__).resolve().parents[2] / "models"
PROMPTS = ("def add(a, b):", "class Stack:\n    def push(self, item):")
# Flags that are keys of the speculative config.
KEYS = ("method", "num_speculative_tokens", "parallel_drafting")
KEYS += ("use_heterogeneous_vocab", "prompt_lookup_max", "prompt_lookup_min")
COUNTERS = "vllm:spec_decode_num_"
# If only --method is given: a public target and its head.
TARGET = "meta-llama/Llama-3.1-8B-Instruct"
HEADS = {
    "eagle": "yuhuili/EAGLE-LLaMA3.1-Instruct-8B",
    "eagle3": "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B",
}


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = FlexibleArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.conflict_handler = "resolve"  # the engine's flags take precedence
    add_dataset_parser(parser)
    names = next(a for a in parser._actions if a.dest == "dataset_name")
    names.choices = [*names.choices, *FIELDS]
    EngineArgs.add_cli_args(parser)
    usual = {"model": None, "dataset_name": None, "num_prompts": 80}
    parser.set_defaults(**usual, backend="openai-chat", disable_log_stats=False)
    if "cpu" in version("vllm"):
        # Compiling takes longer than this; two bfloat16 logits are often equal.
        parser.set_defaults(dtype="float32", compilation_config={"mode": 0})
        parser.set_defaults(gpu_memory_utilization=0.3, max_num_seqs=8)
    add = parser.add_argument
    add("--model-dir", dest="model", help="target; unset, the bundled one")
    add("--draft-model", "--eagle-dir", dest="drafter")
    add("--method", help="unset, the drafter's files decide")
    add("--num-speculative-tokens", "--num-spec-tokens", type=int,
        help="unset, the engine chooses")  # fmt: skip
    add("--prompt-lookup-max", type=int, help="of the method ngram")
    add("--prompt-lookup-min", type=int, help="of the method ngram")
    add("--parallel-drafting", action="store_true")
    add("--use-heterogeneous-vocab", action="store_true")
    add("--tp", dest="tensor_parallel_size", type=int)
    add("--prompt", nargs="+", help="instead of a dataset")
    add("--output-len", type=int, default=256, help="most tokens of an output")
    add("--temp", "--temperature", type=float, default=0.0, help="0 is greedy")
    add("--top-p", type=float, default=1.0)
    add("--top-k", type=int, default=-1)
    add("--print-output", action="store_true", help="the text of a dataset, too")
    add("--test", action="store_true", help="fail if no draft was accepted")
    args = parser.parse_args(arguments)
    if args.dataset_name in FIELDS:
        try:
            found = read_questions(args.dataset_name, Path(args.dataset_path or ""))
        except ValueError as error:
            parser.error(str(error))
        args.prompt = found[: args.num_prompts]
    return args


def speculative_config(args: argparse.Namespace) -> dict[str, Any]:
    """--speculative-config takes precedence over the flags."""
    drafter = args.drafter
    if drafter is None and args.model in (None, TARGET):
        drafter = HEADS.get(args.method)
    if drafter is None and args.method is None and args.model is None:
        drafter = str(MODELS / "pard")
    given = {"model": drafter} | {key: getattr(args, key) for key in KEYS}
    given = {key: value for key, value in given.items() if value not in (None, False)}
    return given | (args.speculative_config or {})


def make_llm(args: argparse.Namespace) -> LLM:
    is_head = args.drafter is None and args.method in HEADS
    target = args.model or (TARGET if is_head else str(MODELS / "target"))
    own = {"model": target, "speculative_config": speculative_config(args)}
    engine = EngineArgs.from_cli_args(argparse.Namespace(**vars(args) | own))
    return LLM(**vars(engine))


def read_prompts(args: argparse.Namespace, tokenizer: Any) -> list[dict[str, Any]]:
    """Prompts of a dataset, or of --prompt; chat models get them as chat messages."""
    texts, name = args.prompt or PROMPTS, args.dataset_name
    if name is not None and name not in FIELDS:  # samples come in the chat template
        samples = get_samples(args, tokenizer)
        ids = [tokenizer.encode(s.prompt, add_special_tokens=False) for s in samples]
    elif args.model is not None or name is not None:
        ids = [encode_chat(tokenizer, text) for text in texts]
    else:  # the bundled target continues text
        ids = [tokenizer.encode(text) for text in texts]
    return [{"prompt_token_ids": prompt} for prompt in ids]


def report(llm: LLM, outputs: list[RequestOutput]) -> float:
    """Prints what was drafted and accepted; returns the mean acceptance length."""
    metrics = {m.name.removeprefix(COUNTERS): m for m in llm.get_metrics()}
    names = ("drafts", "draft_tokens", "accepted_tokens")
    counts = {name: metrics[name].value if name in metrics else 0 for name in names}
    drafts = max(counts["drafts"], 1)
    length = 1 + counts["accepted_tokens"] / drafts
    tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    print("-" * 50)
    print(f"total_num_output_tokens: {tokens}")
    for name, count in counts.items():
        print(f"num_{name}: {count}")
    print(f"mean acceptance length: {length:.2f}")
    print("-" * 50)
    if "accepted_tokens_per_pos" in metrics:
        drafted = metrics["draft_tokens_per_pos"].values
        for i, accepted in enumerate(metrics["accepted_tokens_per_pos"].values):
            if drafted[i]:
                print(f"acceptance at token {i}: {accepted / drafted[i]:.2f}")
    return length


def main(arguments: list[str] | None = None) -> None:
    args = parse(arguments)
    llm = make_llm(args)
    tokenizer = llm.get_tokenizer()
    prompts = read_prompts(args, tokenizer)
    sampling = SamplingParams(
        temperature=args.temp,
        top_p=args.top_p,
        top_k=args.top_k,
        max_tokens=args.output_len,
    )
    outputs = llm.generate(prompts, sampling)
    if args.print_output or args.dataset_name is None:
        for output in outputs:
            prompt = tokenizer.decode(output.prompt_token_ids)
            print(f"{prompt!r} continues\n{output.outputs[0].text}\n")
    if report(llm, outputs) == 1 and args.test:
        sys.exit("No draft was accepted.")


if __name__ == "__main__":
    main()
