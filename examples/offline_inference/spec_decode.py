# SPDX-License-Identifier: Apache-2.0
r"""Offline speculative decoding: prints text, and how much of it drafts have saved.

Without arguments the bundled target continues Python, with PARD as its drafter:

    python spec_decode.py
    python spec_decode.py --model meta-llama/Llama-3.1-8B-Instruct \
        --speculative-config '{"model": "amd/PARD-Llama-3.2-1B"}' --prompt "Tell me why"

What drafters gain, and whether output is the target's, `vllm bench drafters` measures.
"""

import argparse
import json
from importlib.metadata import version
from pathlib import Path

from vllm import LLM, SamplingParams

MODELS = Path(__file__).resolve().parents[2] / "models"
PROMPTS = ("def add(a, b):", "class Stack:\n    def push(self, item):")
COUNTERS = "vllm:spec_decode_num_"


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", default=str(MODELS / "target"))
    add("--speculative-config", type=json.loads, metavar="JSON",
        default={"model": str(MODELS / "pard")})  # fmt: skip
    add("--engine-args", type=json.loads, default={}, metavar="JSON",
        help='more arguments of LLM, as {"tensor_parallel_size": 2}')  # fmt: skip
    add("--prompt", nargs="+", default=list(PROMPTS))
    add("--output-len", type=int, default=64, help="most tokens of an output")
    add("--temperature", type=float, default=0.0, help="0 is greedy")
    return parser.parse_args(arguments)


def make_llm(args: argparse.Namespace) -> LLM:
    engine = {"max_num_seqs": 8, "gpu_memory_utilization": 0.3}
    if "cpu" in version("vllm"):
        # Compiling takes longer than this; two bfloat16 logits are often equal.
        engine |= {"dtype": "float32", "compilation_config": {"mode": 0}}
    return LLM(
        args.model,
        speculative_config=args.speculative_config,
        disable_log_stats=False,  # acceptance is counted in the stats
        **(engine | args.engine_args),
    )


def acceptance_length(llm: LLM) -> float:
    """Mean tokens of a step: accepted drafts, and one more."""
    metrics = {m.name.removeprefix(COUNTERS): m for m in llm.get_metrics()}
    drafts = metrics["drafts"].value
    return 1 + metrics["accepted_tokens"].value / max(drafts, 1)


def main(arguments: list[str] | None = None) -> None:
    args = parse(arguments)
    llm = make_llm(args)
    sampling = SamplingParams(
        temperature=args.temperature, max_tokens=args.output_len, seed=0
    )
    for output in llm.generate(args.prompt, sampling):
        print(f"{output.prompt!r} continues\n{output.outputs[0].text}\n")
    print(f"Acceptance length: {acceptance_length(llm):.2f}")


if __name__ == "__main__":
    main()
