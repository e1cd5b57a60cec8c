# SPDX-License-Identifier: Apache-2.0
"""One engine of the speculative decoding example, in a process of its own.

Reads a job and writes what was measured, both as JSON:
`python spec_decode_engine.py JOB RESULT`. A process of its own gives each engine
clean memory, environment and compiler state.
"""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from vllm import LLM, SamplingParams

WARM_UP_TOKENS = 4
COUNTERS = "vllm:spec_decode_"


def progress_bar(label: str) -> Callable[..., tqdm]:
    """What `LLM.generate` calls for its bars: labels one, hides the other."""

    def bar(*args: Any, **kwargs: Any) -> tqdm:
        hidden = kwargs.get("desc") == "Rendering prompts"
        return tqdm(*args, **{**kwargs, "desc": label, "disable": hidden})

    return bar


def describe_runner(worker: Any) -> dict[str, str | None]:
    """Runs in a worker: which model runner it has, and how Triton kernels run there."""
    from vllm.triton_utils import HAS_TRITON

    runner = worker.model_runner
    homes = [base.__module__ for base in type(runner).__mro__]
    is_v2 = any(home.endswith("v1.worker.gpu.model_runner") for home in homes)
    drafter = getattr(runner, "speculator", None) or getattr(runner, "drafter", None)
    interpreted = False
    if HAS_TRITON:
        from triton import knobs

        interpreted = bool(knobs.runtime.interpret)
    return {
        "runner": "V2" if is_v2 else "V1",
        "kernels": "interpreted" if interpreted else "compiled",
        "speculator": type(drafter).__name__ if drafter is not None else None,
    }


def counters(llm: LLM) -> dict[str, list[int]]:
    """The speculative decoding counters, each as a list (most have one value)."""
    return {
        metric.name.removeprefix(COUNTERS): getattr(metric, "values", None)
        or [getattr(metric, "value", 0)]
        for metric in llm.get_metrics()
        if metric.name.startswith(COUNTERS)
    }


def warm_up(llm: LLM, prompts: list[list[int]], batch: int) -> None:
    """Compiles what compiles at first use. Reversed prompts fill no cache we use."""
    reverse = [{"prompt_token_ids": ids[::-1]} for ids in prompts[:batch]]
    params = SamplingParams(temperature=0, max_tokens=WARM_UP_TOKENS, ignore_eos=True)
    llm.generate(reverse, params, use_tqdm=False)


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Generates from the job's prompts.

    Returns:
        Token ids and text for each prompt, seconds taken, the counters of this
        run, and the runner that did it.
    """
    llm = LLM(**job["engine"])
    warm_up(llm, job["prompts"], job["engine"]["max_num_seqs"])
    prompts = [{"prompt_token_ids": ids} for ids in job["prompts"]]
    params = [SamplingParams(**sampling) for sampling in job["sampling"]]
    before = counters(llm)
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=progress_bar(job["name"]))
    seconds = time.perf_counter() - start
    delta = {
        name: [new - old for new, old in zip(values, before[name], strict=True)]
        for name, values in counters(llm).items()
    }
    return {
        **llm.collective_rpc(describe_runner)[0],
        "device": device_name(),
        "seconds": seconds,
        "counters": delta,
        "token_ids": [list(output.outputs[0].token_ids) for output in outputs],
        "prompts": [
            llm.get_tokenizer().decode(ids, skip_special_tokens=True)
            for ids in job["prompts"]
        ],
        "texts": [output.outputs[0].text for output in outputs],
    }


def device_name() -> str:
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        return "CPU"
    return current_platform.get_device_name()


if __name__ == "__main__":
    job_file, result_file = map(Path, sys.argv[1:])
    result = run(json.loads(job_file.read_text()))
    result_file.write_text(json.dumps(result))
