# SPDX-License-Identifier: Apache-2.0
"""One engine in a process of its own, for tests: `engine_job.py JOB RESULT`.

A job names an engine's arguments and scenarios, which run one after the other. A
scenario is a list of requests that arrive together, each with its prompt's token ids,
how many tokens it wants, and after how many it is aborted, if it is.
"""

import json
import sys
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams

COUNTERS = "vllm:spec_decode_"


def counters(llm: LLM) -> dict[str, list[int]]:
    return {
        metric.name.removeprefix(COUNTERS): getattr(metric, "values", None)
        or [getattr(metric, "value", 0)]
        for metric in llm.get_metrics()
        if metric.name.startswith(COUNTERS)
    }


def sampling(request: dict[str, Any]) -> SamplingParams:
    defaults = {"temperature": 0, "ignore_eos": True}
    return SamplingParams(
        **defaults | request.get("sampling", {}), max_tokens=request["max_tokens"]
    )


def run_scenario(llm: LLM, requests: list[dict[str, Any]]) -> list[list[int] | None]:
    """Token ids of each request; None for an aborted one."""
    engine = llm.llm_engine
    abort_at, tokens = {}, {}
    for number, request in enumerate(requests):
        prompt = {"prompt_token_ids": request["prompt"]}
        engine.add_request(str(number), prompt, sampling(request))
        if "abort_after" in request:
            abort_at[str(number)] = request["abort_after"]
    while engine.has_unfinished_requests():
        for output in engine.step():
            ids = list(output.outputs[0].token_ids)
            tokens[output.request_id] = ids
            if len(ids) >= abort_at.get(output.request_id, sys.maxsize):
                engine.abort_request([output.request_id])
                del abort_at[output.request_id]
                tokens[output.request_id] = None
    return [tokens[str(number)] for number in range(len(requests))]


def runner_of(worker: Any) -> dict[str, Any]:
    """Runs in the worker: its model runner and drafter, and what is left of the KV."""
    runner = worker.model_runner
    drafter = getattr(runner, "speculator", None) or getattr(runner, "drafter", None)
    homes = {base.__module__ for base in type(runner).__mro__}
    return {
        "is_v2": "vllm.v1.worker.gpu.model_runner" in homes,
        "drafter": type(drafter).__name__,
    }


def free_blocks(llm: LLM) -> int:
    core = llm.llm_engine.engine_core.engine_core
    return core.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()


def timed_requests(llm: LLM) -> list[int]:
    """The numbers of requests that an automatic draft length has times for."""
    lengths = llm.llm_engine.engine_core.engine_core.scheduler.draft_lengths
    return [] if lengths is None else sorted(lengths.seconds)


def run(job: dict[str, Any]) -> dict[str, Any]:
    llm = LLM(**job["engine"])
    blocks, results = free_blocks(llm), {}
    for name, requests in job["scenarios"].items():
        before = counters(llm)
        tokens = run_scenario(llm, requests)
        after = counters(llm)
        results[name] = {
            "tokens": tokens,
            "counters": {
                key: [
                    new - old for new, old in zip(after[key], before[key], strict=True)
                ]
                for key in after
            },
        }
    leaked = blocks - free_blocks(llm)
    found = llm.collective_rpc(runner_of)[0]
    found["timed_requests"] = timed_requests(llm)
    return {**found, "scenarios": results, "leaked_blocks": leaked}


if __name__ == "__main__":
    job_file, result_file = map(Path, sys.argv[1:])
    result_file.write_text(json.dumps(run(json.loads(job_file.read_text()))))
