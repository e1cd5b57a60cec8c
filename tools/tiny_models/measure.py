# SPDX-License-Identifier: Apache-2.0
"""Acceptance length of each draft, measured with vLLM on the held-out modules.

``python -m tools.tiny_models.measure`` starts one engine after another, each in a
process of its own, and writes ``measurements.json`` beside the models.
"""

import argparse
import json
import os
import subprocess
import sys
import sysconfig
from itertools import pairwise
from pathlib import Path
from typing import Any

from . import corpus

K = 7
PROMPT_TOKENS, OUTPUT_TOKENS = 128, 128
PER_MODULE = 3
METHODS: dict[str, dict[str, Any]] = {
    "draft": {"method": "draft_model"},
    "pard": {"method": "draft_model", "parallel_drafting": True},
    "pard2": {},
    "eagle3": {"method": "eagle3"},
    "peagle": {"method": "eagle3", "parallel_drafting": True},
}
# One process and native kernels, so that the upstream release alone is measured. It
# cannot draft with PARD-2, for which this tree is measured.
OURS = {"VLLM_USE_V2_MODEL_RUNNER": "1", "TRITON_INTERPRET": "1"}
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "HF_HUB_OFFLINE": "1",
}
RESULT = "RESULT "


def generate(models: Path, stdlib: Path, name: str | None) -> dict[str, Any]:
    """Greedy output for every held-out prompt, with draft ``name`` if there is one."""
    from vllm import LLM, SamplingParams, __version__

    llm = LLM(
        str(models / "target"),
        dtype="float32",
        max_model_len=512,
        gpu_memory_utilization=0.1,
        disable_log_stats=False,
        speculative_config=name and _speculative_config(models, name),
    )
    greedy = SamplingParams(temperature=0, max_tokens=OUTPUT_TOKENS)
    outputs = llm.generate(_prompts(llm.get_tokenizer(), stdlib), greedy)
    texts = [list(output.outputs[0].token_ids) for output in outputs]
    found = _acceptance(llm.get_metrics()) | {"vllm": __version__} if name else {}
    return {"texts": texts, **found}


def _speculative_config(models: Path, name: str) -> dict[str, Any]:
    return {
        "model": str(models / name),
        "num_speculative_tokens": K,
        **METHODS[name],
    }


def _prompts(tokenizer: Any, stdlib: Path) -> list[dict[str, list[int]]]:
    texts = corpus.read_texts(corpus.held_out_files(stdlib))
    tails = [tail for text in texts for tail in corpus.excerpts(text, PER_MODULE)]
    rows = tokenizer(tails)["input_ids"]
    return [
        {"prompt_token_ids": row[:PROMPT_TOKENS]}
        for row in rows
        if len(row) >= PROMPT_TOKENS
    ]


def _acceptance(metrics: list[Any]) -> dict[str, Any]:
    found = {m.name.removeprefix("vllm:spec_decode_num_"): m for m in metrics}
    drafts = found["drafts"].value
    accepted = found["accepted_tokens"].value
    return {
        "acceptance_length": round(1 + accepted / drafts, 3),
        "acceptance_by_position": [
            round(n / drafts, 3) for n in found["accepted_tokens_per_pos"].values
        ],
        "draft_steps": drafts,
    }


def in_a_process(models: Path, stdlib: Path, name: str) -> dict[str, Any]:
    command = [sys.executable, "-m", __spec__.name, "--one", name]
    command += ["--models", str(models), "--stdlib", str(stdlib)]
    env = os.environ | ENVIRONMENT | (OURS if name == "pard2" else {})
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True)
    lines = [x for x in done.stdout.splitlines() if x.startswith(RESULT)]
    if not lines:
        raise RuntimeError(f"measuring {name} ended with status {done.returncode}")
    return json.loads(lines[-1].removeprefix(RESULT))


def measure(models: Path, stdlib: Path, names: list[str]) -> dict[str, Any]:
    """Acceptance of these drafts, and whether they left the target's output alone.

    What was measured of others stays.
    """
    file = models / "measurements.json"
    known = json.loads(file.read_text()) if file.exists() else {}
    alone = in_a_process(models, stdlib, "none")["texts"]
    results: dict[str, Any] = {
        "num_speculative_tokens": K,
        "prompts": len(alone),
        "prompt_tokens": PROMPT_TOKENS,
        "output_tokens": OUTPUT_TOKENS,
        "distinct_bigrams": _variety(alone),
    }
    for name in METHODS:
        if name not in names:
            results |= {name: known[name]} if name in known else {}
            continue
        result = in_a_process(models, stdlib, name)
        texts = result.pop("texts")
        same = sum(a == b for a, b in zip(alone, texts, strict=True))
        results[name] = result | {"outputs_equal": same}
        print(name, results[name], flush=True)
    return results


def _variety(texts: list[list[int]]) -> float:
    """Mean share of a text's token pairs that occur once in it: low where it loops."""
    shares = []
    for text in texts:
        pairs = list(pairwise(text))
        shares.append(len(set(pairs)) / max(1, len(pairs)))
    return round(sum(shares) / len(shares), 3)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.tiny_models.measure")
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    parser.add_argument("--models", type=Path, default=Path("models"))
    parser.add_argument("--stdlib", type=Path, default=stdlib)
    parser.add_argument("--only", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--one", choices=[*METHODS, "none"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        name = None if args.one == "none" else args.one
        print(RESULT + json.dumps(generate(args.models, args.stdlib, name)))
        return
    text = json.dumps(measure(args.models, args.stdlib, args.only), indent=1)
    (args.models / "measurements.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
