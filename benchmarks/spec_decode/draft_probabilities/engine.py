# SPDX-License-Identifier: Apache-2.0
"""An engine in a process of its own that counts tokens: `engine.py JOB RESULT`."""

import json
import sys
import sysconfig
from pathlib import Path
from typing import Any

import torch

from benchmarks.spec_decode.results import slug
from vllm import LLM, SamplingParams, __version__


def held_out_prompts(llm: LLM, job: dict[str, Any]) -> list[list[int]]:
    """Spans of held-out modules of this interpreter's standard library."""
    folder = Path(sysconfig.get_path("stdlib"))
    names = json.loads(Path(job["held_out"]).read_text())
    files = [folder / f"{name}.py" for name in names]
    text = "\n".join(path.read_text() for path in files if path.exists())
    tokens = llm.get_tokenizer()(text, add_special_tokens=False)["input_ids"]
    length = job["prompt_len"]
    stride = (len(tokens) - length) // job["prompts"]
    return [tokens[i * stride : i * stride + length] for i in range(job["prompts"])]


def count(
    llm: LLM, job: dict[str, Any], prompts: list[list[int]], temperature: float
) -> list[tuple[int, int]]:
    """Steps of each request that verified drafts, and the tokens they gave."""
    engine, steps = llm.llm_engine, job["steps"]
    most = 1 + (steps + 1) * (job["num_speculative_tokens"] + 1)
    sampling = SamplingParams(
        temperature=temperature, max_tokens=most, ignore_eos=True, detokenize=False
    )
    given: dict[str, list[int]] = {}  # tokens after each step
    for number, prompt in enumerate(prompts):
        name = f"{temperature}-{number}"
        engine.add_request(name, {"prompt_token_ids": prompt}, sampling)
        given[name] = []
    while engine.has_unfinished_requests():
        for output in engine.step():
            lengths = given[output.request_id]
            lengths.append(len(output.outputs[0].token_ids))
            if len(lengths) == steps + 1:  # the first one is the prompt's
                engine.abort_request([output.request_id])
    return [(steps, lengths[steps] - lengths[0]) for lengths in given.values()]


def main() -> None:
    job_file, result_file = map(Path, sys.argv[1:])
    job = json.loads(job_file.read_text())
    llm = LLM(**job["engine"], seed=0, disable_log_stats=True, use_tqdm_on_load=False)
    prompts = held_out_prompts(llm, job)
    on_gpu = torch.cuda.is_available()
    result = {
        "device": slug(torch.cuda.get_device_name()) if on_gpu else "cpu",
        "torch": torch.__version__,
        "vllm": __version__,
        "counts": {t: count(llm, job, prompts, t) for t in job["temperatures"]},
    }
    result_file.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
