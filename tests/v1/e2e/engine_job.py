# SPDX-License-Identifier: Apache-2.0
"""Runs one engine in a separate process, for tests: `engine_job.py JOB RESULT`.

Without arguments it reads pairs of files from stdin, one pair per line, and forks for
each, so that vLLM is imported only once. It prints `done` when a result is written.

A job has the arguments of an engine, and scenarios, which run one after the other. A
scenario is a list of requests. Each has its prompt's token ids and a number of tokens
to generate, and optionally: rows and columns of its images, each of which replaces one
token of the prompt; whether the prompt is passed as the target's embeddings of it; the
step at which it arrives (by default all arrive at once); its
priority; the folder of its LoRA adapter; the number of tokens after which it is
aborted; whether its output is streamed; other sampling parameters; further parts of its
prompt, with keys that differ from the first part's, each of which continues after the
previous one was answered; whether these arrive only then. A job may also have

    env: additional environment variables;
    async_scheduling: steps are scheduled before the last one's tokens are known;
    preempts_every: all requests are preempted every so many steps;
    pauses_every: the scheduler pauses for a step every so many;
    idle_every: a dummy batch, as an idle data-parallel rank runs it, is run every so
        many steps; `touched_kv` counts those that changed a byte of the KV cache;
    is_multimodal: the target is multimodal, and needs a package that CPU installs may
        lack;
    made_up_times: step times depend on the number of rows: see `made_up_times.py`;
    defaults_of_a_gpu: trees are on by default, and trimming may be, as on a GPU;
    drafts_by_turns: draft lengths of the steps, in turn, instead of the choice of
        "auto";
    record_graphs: draft passes are CUDA graphs, emulated on a CPU: see `recorded.py`;
    record_drafts, keep_drafts, watch_waits: what to record or check, with one class of
        `watches.py` each;
    sleeps: by scenario, the sleep level of the engine before it; after level 2 the
        target's weights are reloaded. `forgotten` has tensors of the acceptance
        estimator that this changed;
    watch_loading: `discarded` has tensors that sleep discards: see `loaded_tensors.py`;
    updates: by scenario, folders of the weights that target and drafter get before it;
        those that are sent use `weight_files.py`.

If workers run in separate processes, only outputs and counters are known.
"""

import gc
import importlib
import json
import os
import sys
import traceback
from collections import defaultdict
from collections.abc import Iterable
from copy import deepcopy
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from loaded_tensors import LoadedTensors, tensors_of
from recorded import Replays, recorded_calls
from watches import DraftRecord, HostWaits, KeptDrafts, around

from vllm import LLM, SamplingParams
from vllm.config.drafter import length, support
from vllm.lora.request import LoRARequest
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.platforms import current_platform
from vllm.sampling_params import (
    RepetitionDetectionParams,
    RequestOutputKind,
    StructuredOutputsParams,
)
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.metrics.reader import Gauge

COUNTERS = ("vllm:spec_decode_", "vllm:num_preemptions", "vllm:prefix_cache_hits")
COUNTERS += ("vllm:external_prefix_cache_hits",)
# Modules that an engine without a GPU imports when it starts.
IMPORTED_LATE = (
    "vllm.model_executor.models.llama",
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu.model_runner",
    "vllm.v1.worker.cpu_worker",
)
# On a GPU tests run in parallel, so none may take a share of the free memory.
KV_CACHE_BYTES = 1 << 30
# Sampling parameters that JSON cannot hold.
FROM_JSON = {
    "logit_bias": lambda biases: {int(token): bias for token, bias in biases.items()},
    "repetition_detection": lambda given: RepetitionDetectionParams(**given),
    "structured_outputs": lambda given: StructuredOutputsParams(**given),
}
# Draft passes with prompts would need a compiled model, so they run eagerly, as on a
# CPU.
GRAPHS = {
    "enforce_eager": False,
    "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
}


def engine_arguments(job: dict[str, Any]) -> dict[str, Any]:
    """Engine arguments with which a GPU behaves like a CPU."""
    given = dict(job["engine"])
    if not job.get("async_scheduling"):
        given["async_scheduling"] = False
    if not current_platform.is_cpu():
        given["kv_cache_memory_bytes"] = KV_CACHE_BYTES
        if job.get("record_graphs"):
            given |= GRAPHS
    return given


def counters(llm: LLM) -> dict[str, list[int]]:
    """Counters by name, with one number for each value of a label."""
    found: defaultdict[str, list[int]] = defaultdict(list)
    for metric in llm.get_metrics():
        if metric.name.startswith(COUNTERS) and not isinstance(metric, Gauge):
            name = metric.name.removeprefix("vllm:").removeprefix("spec_decode_")
            found[name] += getattr(metric, "values", [getattr(metric, "value", 0)])
    return found


def sampling(request: dict[str, Any]) -> SamplingParams:
    given = {"temperature": 0, "ignore_eos": True} | request.get("sampling", {})
    given |= {key: FROM_JSON[key](given[key]) for key in FROM_JSON.keys() & given}
    if request.get("stream"):
        given["output_kind"] = RequestOutputKind.DELTA
    return SamplingParams(**given, max_tokens=request["max_tokens"])


def force_async_scheduling() -> None:
    """Turns asynchronous scheduling on, which the CPU platform turns off."""
    platform = type(current_platform)
    settle = platform.check_and_update_config

    def settle_async(vllm_config: Any) -> None:
        settle(vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    platform.check_and_update_config = staticmethod(settle_async)


class IdleRank:
    """Runs dummy batches between steps, and checks that the KV cache is unchanged.

    Dummy batches that the engine itself runs are counted, too.
    """

    def __init__(self, core: Any, every: int) -> None:
        self.core, self.every = core, every
        self.steps = self.ran = self.touched_kv = 0
        around(core, "execute_dummy_batch", before=self._count)

    def _count(self, given: dict[str, Any]) -> None:
        self.ran += 1

    def after_step(self) -> None:
        self.steps += 1
        if not self.every or self.steps % self.every:
            return
        runner = self.core.model_executor.driver_worker.model_runner
        before = [cache.clone() for cache in runner.kv_caches]
        self.core.execute_dummy_batch()
        pairs = zip(before, runner.kv_caches, strict=True)
        self.touched_kv += not all(torch.equal(*pair) for pair in pairs)


class Interruptions:
    """Preempts all requests, or pauses the scheduler, every so many steps."""

    def __init__(self, scheduler: Any, job: dict[str, Any]) -> None:
        self.scheduler = scheduler
        self.preempts_every = job.get("preempts_every", sys.maxsize)
        self.pauses_every = job.get("pauses_every", sys.maxsize)

    def after_step(self, step: int) -> None:
        if step % self.preempts_every == 0:
            while running := self.scheduler.running:
                self.scheduler._preempt_request(running.pop(), 0.0)
        is_pause = step % self.pauses_every == 0
        state = PauseState.PAUSED_ALL if is_pause else PauseState.UNPAUSED
        if state != self.scheduler.pause_state:
            self.scheduler.set_pause_state(state)


class Watched:
    """The only worker of an engine, with the checks that a job asks for."""

    def __init__(self, worker: Any, job: dict[str, Any]) -> None:
        self.speculator = speculator = worker.model_runner.speculator
        if job.get("record_graphs") and current_platform.is_cpu():
            speculator.runner.graphs = recorded_calls(speculator)
        self.replays = Replays(speculator)
        self.drafts = DraftRecord(worker) if job.get("record_drafts") else None
        self.kept = KeptDrafts(worker) if job.get("keep_drafts") else None
        self.waits = HostWaits(worker) if job.get("watch_waits") else None

    def estimates(self) -> dict[str, torch.Tensor]:
        """Copies of the acceptance estimator's tensors, if it has learned anything."""
        estimator = getattr(self.speculator, "acceptance_estimator", None)
        if estimator is None:
            return {}
        assert estimator._refits > 0
        return {name: each.cpu() for name, each in tensors_of(estimator, "").items()}

    def take_drafts(self) -> list[Any]:
        return self.drafts.take() if self.drafts else []

    def describe(self) -> dict[str, Any]:
        drafter = getattr(self.speculator, "drafter", self.speculator)
        return {
            "drafter": type(drafter).__name__,
            "replays": self.replays.found,
            "kept": self.kept.found if self.kept else {},
            "waits": sorted(self.waits.found) if self.waits else [],
        }


class Answer:
    """Outputs of one request, by index if it asks for several (`n`)."""

    def __init__(self, request: dict[str, Any]) -> None:
        self.request = request
        self.tokens: dict[int, list[int]] = {0: []}
        self.logprobs: dict[int, Any] = {}
        self.prompt_logprobs: list[Any] = []
        self.metrics: dict[int, dict[str, Any]] = {}
        self.is_aborted = False
        self.text, self.end = "", ""
        self.parts: list[int] = []  # tokens after each answered part of the prompt

    def take(self, output: CompletionOutput) -> bool:
        """Whether the request is to be aborted now."""
        is_delta, at = self.request.get("stream", False), output.index
        self.tokens[at] = (self.tokens[at] if is_delta else []) + [*output.token_ids]
        if at == 0:
            self.text = (self.text if is_delta else "") + output.text
            self.end = output.finish_reason or ""
        if output.spec_decode_metrics is not None:
            self.metrics[at] = output.spec_decode_metrics.to_dict()
        if output.finished():
            self.parts.append(len(self.tokens[at]))
        before = self.logprobs.get(at) if is_delta else None
        self.logprobs[at] = (before or []) + by_token(output.logprobs)
        # A finished request can no longer be aborted.
        enough = len(self.tokens[0]) >= self.request.get("abort_after", sys.maxsize)
        self.is_aborted = enough and not output.finished()
        return self.is_aborted

    def is_next_due(self) -> bool:
        """Whether a part of the prompt is to be added that waits for this answer."""
        is_late = self.end and self.request.get("is_late")
        return bool(is_late and len(self.parts) <= len(self.request["then"]))

    def take_prompt(self, output: RequestOutput) -> None:
        """Keeps the prompt's logprobs, which a single delta has."""
        scores, rows = output.prompt_token_id_logprobs, by_token(output.prompt_logprobs)
        rows += [] if scores is None else scores.tolist()
        self.prompt_logprobs = rows or self.prompt_logprobs


def by_token(rows: Iterable[Any] | None) -> list[Any]:
    """Logprobs by token id of each position; a prompt's first one has none."""
    return [
        row and {token: one.logprob for token, one in row.items()} for row in rows or ()
    ]


def results_of(answers: list[Answer]) -> dict[str, list[Any]]:
    """Results by kind; `all_tokens` and `logprobs` have all outputs of a request."""
    return {
        "tokens": [answer.tokens[0] for answer in answers],
        "all_tokens": [in_order(answer.tokens) for answer in answers],
        "logprobs": [in_order(answer.logprobs) for answer in answers],
        "prompt_logprobs": [answer.prompt_logprobs for answer in answers],
        "parts": [answer.parts for answer in answers],
        "metrics": [in_order(answer.metrics) for answer in answers],
        "aborted": [answer.is_aborted for answer in answers],
        "texts": [answer.text for answer in answers],
        "ends": [answer.end for answer in answers],
    }


def in_order(by_index: dict[int, Any]) -> list[Any]:
    return [by_index[at] for at in sorted(by_index)]


def add_request(engine: LLMEngine, name: str, request: dict[str, Any]) -> None:
    if "then" in request:
        number = 1 if request.get("is_late") else 1 + len(request["then"])
        for part in range(number):
            add_part(engine, name, request, part)
        return
    prompt = {"prompt_token_ids": request["prompt"]}
    if sides := request.get("images"):
        pictures = importlib.import_module("images").picture
        images = [pictures(*side) for side in sides]
        prompt["multi_modal_data"] = {"image": images}
    if request.get("embeds"):
        prompt = {"prompt_embeds": embeddings(engine, request["prompt"])}
    given: dict[str, Any] = {"priority": request.get("priority", 0)}
    if folder := request.get("lora"):
        given["lora_request"] = LoRARequest("adapter", 1, folder)
    engine.add_request(name, prompt, sampling(request), **given)


def embeddings(engine: LLMEngine, tokens: list[int]) -> torch.Tensor:
    """[tokens, hidden size], the target's."""

    def embed(worker: Any) -> torch.Tensor:
        return worker.model_runner.model.embed_input_ids(torch.tensor(tokens))

    return engine.collective_rpc(embed)[0]


def add_part(
    engine: LLMEngine, name: str, request: dict[str, Any], number: int
) -> None:
    """Adds a part of streamed input, as `AsyncLLM` does; its outputs are deltas.

    The last one also ends the session.
    """
    parts = [request, *request["then"]]
    is_last = number + 1 == len(parts)
    for part in [parts[number], {"prompt": [0]}][: 1 + is_last]:
        one = engine.input_processor.process_inputs(
            f"{name}-session",
            {"prompt_token_ids": part["prompt"]},
            sampling(request | part | {"stream": True}),
            supported_tasks=engine.get_supported_tasks(),
            resumable=part is parts[number],
        )
        one.external_req_id = name
        engine.output_processor.add_request(one, None, None, 0)
        # Both append to it later, as in separate processes.
        engine.engine_core.add_request(deepcopy(one))


def run_scenario(
    llm: LLM,
    requests: list[dict[str, Any]],
    idle: IdleRank,
    interruptions: "Interruptions",
) -> list[Answer]:
    engine, step = llm.llm_engine, 0
    answers = {str(number): Answer(request) for number, request in enumerate(requests)}
    waiting = dict(answers)

    while waiting or engine.has_unfinished_requests():
        for name, answer in list(waiting.items()):
            if (request := answer.request).get("arrives", 0) <= step:
                add_request(engine, name, request)
                del waiting[name]
        for output in engine.step():
            answer = answers[output.request_id]
            answer.take_prompt(output)
            if any([answer.take(one) for one in output.outputs]):
                engine.abort_request([output.request_id])
            if answer.is_next_due():
                add_part(engine, output.request_id, answer.request, len(answer.parts))
        idle.after_step()
        step += 1
        interruptions.after_step(step)
    return list(answers.values())


def free_blocks(scheduler: Any) -> int:
    return scheduler.kv_cache_manager.block_pool.get_num_free_blocks()


def timed_requests(scheduler: Any) -> list[int]:
    """The batch sizes that "auto" has step times for."""
    policy = scheduler.step_drafts.policy
    measured = {} if policy is None else policy.chooser.times.measured
    return sorted({size for by_size in measured.values() for size in by_size})


def take_defaults_of_a_gpu() -> None:
    for module in (length, support):
        module.current_platform = SimpleNamespace(is_cpu=lambda: False)


def draft_by_turns(scheduler: Any, lengths: list[int]) -> None:
    turns = cycle(lengths)
    scheduler.step_drafts.policy.chooser.choose = lambda *_: next(turns)


def run(job: dict[str, Any]) -> dict[str, Any]:
    os.environ |= job.get("env", {})
    if job.get("async_scheduling"):
        force_async_scheduling()
    if job.get("defaults_of_a_gpu"):
        take_defaults_of_a_gpu()
    if job.get("is_multimodal"):
        register = importlib.import_module("without_torchvision").register_model
        register(job["engine"]["model"])
    if job.get("made_up_times"):
        importlib.import_module("made_up_times").make_up_times()
    loaded = LoadedTensors() if job.get("watch_loading") else None
    llm = LLM(**engine_arguments(job))
    # The engine core runs in this process, and so does its worker if there is only one.
    core = llm.llm_engine.engine_core.engine_core
    if turns := job.get("drafts_by_turns"):
        draft_by_turns(core.scheduler, turns)
    idle = IdleRank(core, job.get("idle_every", 0))
    interruptions = Interruptions(core.scheduler, job)
    worker = getattr(core.model_executor, "driver_worker", None)
    watched = Watched(worker, job) if worker else None
    blocks, results, forgotten = free_blocks(core.scheduler), {}, []
    for name, requests in job["scenarios"].items():
        if level := job.get("sleeps", {}).get(name):
            learned = watched.estimates()
            sleep(llm, level, job["engine"]["model"])
            forgotten += changed(learned, watched.estimates())
        if folders := job.get("updates", {}).get(name):
            update_weights(llm, **folders)
        before = counters(llm)
        answers = run_scenario(llm, requests, idle, interruptions)
        results[name] = {
            **results_of(answers),
            "drafts": watched.take_drafts() if watched else [],
            "counters": difference(counters(llm), before),
        }
    return {
        "scheduler": type(core.scheduler).__name__,
        "scenarios": results,
        "leaked_blocks": blocks - free_blocks(core.scheduler),
        "timed_requests": timed_requests(core.scheduler),
        "idle_batches": idle.ran,
        "touched_kv": idle.touched_kv,
        "forgotten": forgotten,
        "discarded": loaded.kept_by(worker.model_runner) if loaded else [],
        **(watched.describe() if watched else {}),
    }


def sleep(llm: LLM, level: int, target: str) -> None:
    llm.sleep(level)
    llm.wake_up()
    if level == 2:
        update_weights(llm, target)


def changed(before: dict[str, torch.Tensor], now: dict[str, torch.Tensor]) -> list[str]:
    return [name for name, each in before.items() if not torch.equal(each, now[name])]


def update_weights(
    llm: LLM, target: str = "", sent_target: str = "", sent_drafter: str = ""
) -> None:
    """Updates weights as after a training step, and drops cached KV of the old ones."""
    if target:
        llm.collective_rpc("reload_weights", kwargs={"weights_path": target})
    sent = {
        sent_target: llm.start_weight_update,
        sent_drafter: llm.start_draft_weight_update,
    }
    for folder, start in sent.items():
        if folder:
            start()
            llm.update_weights({"update_info": {"folder": folder}})
            llm.finish_weight_update()
    assert llm.reset_prefix_cache()


def difference(
    after: dict[str, list[int]], before: dict[str, list[int]]
) -> dict[str, list[int]]:
    pairs = {key: zip(after[key], before[key], strict=True) for key in after}
    return {key: [new - old for new, old in pair] for key, pair in pairs.items()}


def run_files(job_file: str, result_file: str) -> None:
    """Runs a job; if the engine does not start, the result is its error."""
    try:
        result = run(json.loads(Path(job_file).read_text()))
    except Exception as error:
        result = {"error": f"{type(error).__name__}: {error}"}
        traceback.print_exc()
    Path(result_file).write_text(json.dumps(result))


def fork(job_file: str, result_file: str) -> str:
    """Runs a job in a fork; returns how it ended."""
    if os.fork() == 0:
        run_files(job_file, result_file)
        sys.stderr.flush()
        os._exit(0)  # do not wait for the engine's threads
    return "killed" if os.wait()[1] else "done"


def main() -> None:
    say = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # all other output goes to the log
    if files := sys.argv[1:]:
        run_files(*files)
        print("done", file=say, flush=True)
        return
    for module in IMPORTED_LATE:
        importlib.import_module(module)
    gc.freeze()  # otherwise each engine's GC traverses all imported modules
    for line in sys.stdin:
        print(fork(*line.split()), file=say, flush=True)


if __name__ == "__main__":
    main()
