# SPDX-License-Identifier: Apache-2.0
"""One engine in a process of its own, for tests: `engine_job.py JOB RESULT`.

A job names an engine's arguments and scenarios, which run one after the other. A
scenario is a list of requests, each with its prompt's token ids and how many tokens it
wants, and, if it has them: the step at which it arrives, else all arrive together; its
priority; after how many tokens it is aborted; whether its answer is streamed; further
sampling parameters. Beyond that a job may ask for

    async_scheduling: steps are scheduled before the last one's tokens are known;
    idle_every: a dummy batch, as an idle data-parallel rank runs it, every so many
        steps; `touched_kv` then counts those that changed a byte of the KV cache;
    record_drafts: all drafts made, each with the number of tokens known before it;
    record_fed: what each slot of a PARD-2 drafter is fed: see `fed_rows.py`;
    record_graphs: draft passes are CUDA graphs, on a CPU as if: see `recorded.py`.
"""

import json
import sys
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from fed_rows import FedRows
from recorded import record_graphs

from vllm import LLM, SamplingParams
from vllm.outputs import CompletionOutput
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

COUNTERS = ("vllm:spec_decode_", "vllm:num_preemptions", "vllm:prefix_cache_hits")
# On a GPU: tests run side by side, so none takes a share of what memory is left.
KV_CACHE_BYTES = 1 << 30
# Draft passes with prompts in them, which need a compiled model, run as on a CPU.
GRAPHS = {
    "enforce_eager": False,
    "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
}


def engine_arguments(job: dict[str, Any]) -> dict[str, Any]:
    """What the engine is started with, so that a GPU does what a CPU does."""
    given = dict(job["engine"])
    if not job["async_scheduling"]:
        given["async_scheduling"] = False
    if not current_platform.is_cpu():
        given["kv_cache_memory_bytes"] = KV_CACHE_BYTES
        if job["record_graphs"]:
            given |= GRAPHS
    return given


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
    given = {"temperature": 0, "ignore_eos": True} | request.get("sampling", {})
    if "structured_outputs" in given:
        grammar = StructuredOutputsParams(**given["structured_outputs"])
        given["structured_outputs"] = grammar
    if request.get("stream"):
        given["output_kind"] = RequestOutputKind.DELTA
    return SamplingParams(**given, max_tokens=request["max_tokens"])


def force_async_scheduling() -> None:
    """Undoes that the CPU platform turns asynchronous scheduling off."""
    platform = type(current_platform)
    settle = platform.check_and_update_config

    def settle_async(vllm_config: Any) -> None:
        settle(vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    platform.check_and_update_config = staticmethod(settle_async)


class DraftRecord:
    """Stands before the speculator's `propose` and notes what it was asked for."""

    def __init__(self, runner: Any) -> None:
        self.propose = runner.speculator.propose
        self.signature = signature(self.propose)
        self.rows: list[tuple[str, int, list[int]]] = []
        runner.speculator.propose = self

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        drafts = self.propose(*args, **kwargs)
        given = self.signature.bind(*args, **kwargs).arguments
        # From 0.33.0 on it is asked for none where no request can use any.
        asked = given.get("num_speculative_tokens")
        if not given.get("dummy_run") and asked != 0:
            self._note(drafts[:, :asked].tolist(), given)
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


class Answer:
    """What comes of one request."""

    def __init__(self, request: dict[str, Any]) -> None:
        self.request = request
        self.tokens: list[int] = []
        self.is_aborted = False
        self.text, self.end, self.steps = "", "", 0

    def take(self, output: CompletionOutput) -> bool:
        """Whether the request is to be aborted now."""
        is_delta = self.request.get("stream", False)
        self.tokens = (self.tokens if is_delta else []) + list(output.token_ids)
        self.text = (self.text if is_delta else "") + output.text
        self.end = output.finish_reason or ""
        # What has ended can no longer be aborted.
        enough = len(self.tokens) >= self.request.get("abort_after", sys.maxsize)
        self.is_aborted = enough and not output.finished()
        return self.is_aborted


def run_scenario(
    llm: LLM, requests: list[dict[str, Any]], idle: IdleRank
) -> list[Answer]:
    engine, step = llm.llm_engine, 0
    answers = {str(number): Answer(request) for number, request in enumerate(requests)}
    waiting = dict(answers)
    while waiting or engine.has_unfinished_requests():
        for name, answer in list(waiting.items()):
            if (request := answer.request).get("arrives", 0) <= step:
                prompt = {"prompt_token_ids": request["prompt"]}
                priority = request.get("priority", 0)
                engine.add_request(name, prompt, sampling(request), priority=priority)
                del waiting[name]
        for output in engine.step():
            answers[output.request_id].steps = step
            if answers[output.request_id].take(output.outputs[0]):
                engine.abort_request([output.request_id])
        idle.after_step()
        step += 1
    return list(answers.values())


def describe(runner: Any) -> dict[str, Any]:
    drafter = getattr(runner, "speculator", None) or getattr(runner, "drafter", None)
    drafter = getattr(drafter, "drafter", drafter)  # of the unified speculator
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
    llm = LLM(**engine_arguments(job))
    # The engine's core and its worker live in this process.
    core = llm.llm_engine.engine_core.engine_core
    worker = llm.collective_rpc(lambda worker: worker)[0]
    idle = IdleRank(worker, job["idle_every"])
    record = DraftRecord(worker.model_runner) if job["record_drafts"] else None
    fed = FedRows(worker.model_runner) if job.get("record_fed") else None
    graphs = record_graphs(worker) if job["record_graphs"] else None
    blocks, results = free_blocks(core.scheduler), {}
    for name, requests in job["scenarios"].items():
        before = counters(llm)
        answers = run_scenario(llm, requests, idle)
        after = counters(llm)
        results[name] = {
            "tokens": [answer.tokens for answer in answers],
            "aborted": [answer.is_aborted for answer in answers],
            "texts": [answer.text for answer in answers],
            "ends": [answer.end for answer in answers],
            "last_steps": [answer.steps for answer in answers],
            "drafts": record.take() if record else [],
            "fed": fed.take() if fed else [],
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
        "replays": graphs.replayed if graphs else {},
    }


if __name__ == "__main__":
    job_file, result_file = map(Path, sys.argv[1:])
    result_file.write_text(json.dumps(run(json.loads(job_file.read_text()))))
