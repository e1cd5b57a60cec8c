# SPDX-License-Identifier: Apache-2.0
"""One engine of the speculative decoding example: `spec_decode_engine.py JOB RESULT`.

Both are JSON files: JOB says what to generate, RESULT is what was measured.
"""

import json
import sys
import time
from collections import defaultdict
from itertools import zip_longest
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams
from vllm.platforms import current_platform
from vllm.v1.metrics.reader import Gauge

COUNTERS = "vllm:spec_decode_"


def counters(llm: LLM) -> dict[str, list[int]]:
    """The speculative decoding counters, each as a list: one value for each of its
    labels, such as positions. New labels come last."""
    found: dict[str, list[int]] = defaultdict(list)
    for metric in llm.get_metrics():
        if metric.name.startswith(COUNTERS) and not isinstance(metric, Gauge):
            values = getattr(metric, "values", None) or [getattr(metric, "value", 0)]
            found[metric.name.removeprefix(COUNTERS)] += values
    return found


def warm_up(llm: LLM, prompts: list[list[int]], batch: int) -> None:
    """Triggers lazy compilation. Prompts are reversed to avoid prefix cache hits."""
    reverse = [{"prompt_token_ids": ids[::-1]} for ids in prompts[:batch]]
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    llm.generate(reverse, params, use_tqdm=False)


def run(job: dict[str, Any]) -> dict[str, Any]:
    llm = LLM(**job["engine"], use_tqdm_on_load=False)
    warm_up(llm, job["prompts"], job["engine"]["max_num_seqs"])
    prompts = [{"prompt_token_ids": ids} for ids in job["prompts"]]
    sampling = SamplingParams(**job["sampling"])
    before, start = counters(llm), time.perf_counter()
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    seconds = time.perf_counter() - start
    is_cpu = current_platform.is_cpu()
    return {
        "device": "CPU" if is_cpu else current_platform.get_device_name(),
        "seconds": seconds,
        "counters": {
            name: [a - b for a, b in zip_longest(values, before[name], fillvalue=0)]
            for name, values in counters(llm).items()
        },
        "token_ids": [list(output.outputs[0].token_ids) for output in outputs],
    }


if __name__ == "__main__":
    job_file, result_file = map(Path, sys.argv[1:])
    result_file.write_text(json.dumps(run(json.loads(job_file.read_text()))))
