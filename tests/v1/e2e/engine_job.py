# SPDX-License-Identifier: Apache-2.0
"""One engine in a process of its own, for tests: `engine_job.py JOB RESULT`.

A job names an engine's arguments and scenarios, which run one after the other. A
scenario is a list of requests that arrive together, each with its prompt's token ids,
how many tokens it wants, and after how many it is aborted, if it is. Beyond that a job
may ask for

    async_scheduling: steps are scheduled before the last one's tokens are known;
    idle_every: a dummy batch, as an idle data-parallel rank runs it, every so many
        steps; `touched_kv` then counts those that changed a byte of the KV cache;
    record_drafts: all drafts made, each with the number of tokens known before it;
    record_graphs: draft passes run as on a GPU with CUDA graphs, see `recorded.py`.
"""

import json
import sys
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from recorded import record_graphs

from vllm import LLM, SamplingParams

COUNTERS = ("vllm:spec_decode_", "vllm:num_preemptions")


def counters(llm: LLM) -> dict[str, list[int]]:
    return {
        metric.name.removeprefix("vllm:").removeprefix("spec_decode_"): getattr(
            metric, "values", None
        )
        or [getattr(metric, "value", 0)]
        for metric in llm.get_metrics()
        if metric.name.startswith(COUNTERS)
    }


def sampling(request: dict[str, Any]) -> SamplingParams:
    defaults = {"temperature": 0, "ignore_eos": True}
    return SamplingParams(
        **defaults | request.get("sampling", {}), max_tokens=request["max_tokens"]
    )


def force_async_scheduling() -> None:
    """Undoes that the CPU platform turns asynchronous scheduling off."""
    from vllm.platforms import current_platform

    platform = type(current_platform)
    settle = platform.check_and_update_config

    def settle_async(vllm_config: Any) -> None:
        settle(vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    platform.check_and_update_config = staticmethod(settle_async)


class DraftRecord:
    """Stands before the speculator's `propose` and notes what it returns."""

    def __init__(self, runner: Any) -> None:
        self.propose = runner.speculator.propose
        self.signature = signature(self.propose)
        self.rows: list[tuple[str, int, list[int]]] = []
        runner.speculator.propose = self

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        drafts = self.propose(*args, **kwargs)
        given = self.signature.bind(*args, **kwargs).arguments
        if not given.get("dummy_run"):
            self._note(drafts.tolist(), given)
        return drafts

    def _note(self, drafts: list[list[int]], given: dict[str, Any]) -> None:
        batch = given["input_batch"]
        sampled, rejected = given["num_sampled"], given["num_rejected"]
        for row, name in enumerate(batch.req_ids):
            if sampled[row] > 0:  # else a prompt is still being chunked
                begin, end = batch.query_start_loc[row : row + 2].tolist()
                valid = end - begin - int(rejected[row])
                known = int(batch.positions[begin]) + valid + 1
                self.rows.append((name.partition("-")[0], known, drafts[row]))

    def take(self) -> list[tuple[str, int, list[int]]]:
        taken, self.rows = self.rows, []
        return taken


class IdleRank:
    """Runs dummy batches between the steps, and watches the KV cache."""

    def __init__(self, worker: Any, every: int) -> None:
        self.worker, self.every = worker, every
        self.steps = self.ran = self.touched_kv = 0

    def after_step(self) -> None:
        self.steps += 1
        if not self.every or self.steps % self.every:
            return
        before = [cache.clone() for cache in self.worker.model_runner.kv_caches]
        self.worker.execute_dummy_batch()
        after = self.worker.model_runner.kv_caches
        same = (torch.equal(*pair) for pair in zip(before, after, strict=True))
        self.touched_kv += not all(same)
        self.ran += 1


def run_scenario(
    llm: LLM, requests: list[dict[str, Any]], idle: IdleRank
) -> list[list[int] | None]:
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
        idle.after_step()
    return [tokens[str(number)] for number in range(len(requests))]


def describe(runner: Any) -> dict[str, Any]:
    drafter = getattr(runner, "speculator", None) or getattr(runner, "drafter", None)
    homes = {base.__module__ for base in type(runner).__mro__}
    return {
        "is_v2": "vllm.v1.worker.gpu.model_runner" in homes,
        "drafter": type(drafter).__name__,
    }


def free_blocks(scheduler: Any) -> int:
    return scheduler.kv_cache_manager.block_pool.get_num_free_blocks()


def timed_requests(scheduler: Any) -> list[int]:
    """The numbers of requests that an automatic draft length has times for."""
    lengths = scheduler.draft_lengths
    return [] if lengths is None else sorted(lengths.seconds)


def run(job: dict[str, Any]) -> dict[str, Any]:
    if job["async_scheduling"]:
        force_async_scheduling()
    llm = LLM(**job["engine"])
    # The engine's core and its worker live in this process.
    core = llm.llm_engine.engine_core.engine_core
    worker = llm.collective_rpc(lambda worker: worker)[0]
    idle = IdleRank(worker, job["idle_every"])
    record = DraftRecord(worker.model_runner) if job["record_drafts"] else None
    graphs = record_graphs(worker) if job["record_graphs"] else None
    blocks, results = free_blocks(core.scheduler), {}
    for name, requests in job["scenarios"].items():
        before = counters(llm)
        tokens = run_scenario(llm, requests, idle)
        after = counters(llm)
        results[name] = {
            "tokens": tokens,
            "drafts": record.take() if record else [],
            "counters": {
                key: [
                    new - old for new, old in zip(after[key], before[key], strict=True)
                ]
                for key in after
            },
        }
    return {
        **describe(worker.model_runner),
        "scheduler": type(core.scheduler).__name__,
        "scenarios": results,
        "leaked_blocks": blocks - free_blocks(core.scheduler),
        "idle_batches": idle.ran,
        "touched_kv": idle.touched_kv,
        "timed_requests": timed_requests(core.scheduler),
        "replays": graphs.counts() if graphs else {},
    }


if __name__ == "__main__":
    job_file, result_file = map(Path, sys.argv[1:])
    result_file.write_text(json.dumps(run(json.loads(job_file.read_text()))))
