# SPDX-License-Identifier: Apache-2.0
"""An engine in a process of its own that draws outputs: `engine.py JOB RESULT`."""

import json
import sys
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams
from vllm.sampling_params import StructuredOutputsParams

PROMPT = [1, 2]


def make_engine(job: dict[str, Any]) -> LLM:
    return LLM(
        job["target"],
        speculative_config=job["speculative_config"],
        max_model_len=32,
        max_num_seqs=job["max_num_seqs"],
        max_logprobs=job["vocab"],
        disable_log_stats=False,
        seed=0,
        **job["engine"],
    )


def next_logprobs(llm: LLM, job: dict[str, Any]) -> list[list[float]]:
    """The target's logprobs of every token after each known output."""
    prompts = [{"prompt_token_ids": PROMPT + known} for known in job["known"]]
    sampling = SamplingParams(
        temperature=0, max_tokens=1, ignore_eos=True, logprobs=job["vocab"]
    )
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    found = [output.outputs[0].logprobs[0] for output in outputs]
    return [[row[token].logprob for token in range(job["vocab"])] for row in found]


def draw(llm: LLM, job: dict[str, Any], setting: dict[str, Any]) -> dict[str, Any]:
    before, regex = accepted(llm), setting.get("regex")
    bias = {int(k): value for k, value in setting.get("logit_bias", {}).items()}
    sampling = [
        SamplingParams(
            temperature=setting["temperature"],
            top_p=setting["top_p"],
            seed=number if setting.get("seeded") else None,
            logit_bias=bias or None,
            structured_outputs=StructuredOutputsParams(regex=regex) if regex else None,
            max_tokens=job["length"],
            ignore_eos=True,
            detokenize=False,
        )
        for number in range(job["samples"])
    ]
    prompts = [{"prompt_token_ids": PROMPT}] * job["samples"]
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    drafts, tokens = (new - old for new, old in zip(accepted(llm), before, strict=True))
    return {
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        "acceptance_length": 1 + tokens / drafts if drafts else None,
    }


def accepted(llm: LLM) -> tuple[int, int]:
    metrics = {metric.name: metric for metric in llm.get_metrics()}
    names = ("num_drafts", "num_accepted_tokens")
    found = [metrics.get(f"vllm:spec_decode_{name}") for name in names]
    return tuple(metric.value if metric else 0 for metric in found)


def main() -> None:
    job_file, result_file = map(Path, sys.argv[1:])
    job = json.loads(job_file.read_text())
    llm = make_engine(job)
    settings = job["settings"].items()
    result = {"draws": {name: draw(llm, job, asked) for name, asked in settings}}
    if job["known"]:
        result["logprobs"] = next_logprobs(llm, job)
    result_file.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
