# SPDX-License-Identifier: Apache-2.0
"""An engine for tests of sampling, as `engine_job.py` is for greedy ones.

A scenario's requests arrive together. Beside its tokens each has the logprobs that it
asked for; a draft model's drafts are watched, see `kept_drafts.py`.
"""

import json
import sys
from pathlib import Path
from typing import Any

from engine_job import counters, describe, engine_arguments, force_async_scheduling
from kept_drafts import KeptDrafts
from recorded import record_graphs

from vllm import LLM, SamplingParams
from vllm.outputs import CompletionOutput
from vllm.sampling_params import RequestOutputKind


def sampling(request: dict[str, Any]) -> SamplingParams:
    asked = {"temperature": 0, "ignore_eos": True} | request["sampling"]
    if "logit_bias" in asked:  # JSON's keys are strings
        asked["logit_bias"] = {int(t): bias for t, bias in asked["logit_bias"].items()}
    kind = RequestOutputKind.FINAL_ONLY
    return SamplingParams(**asked, output_kind=kind, max_tokens=request["max_tokens"])


def logprobs(output: CompletionOutput) -> list[dict[int, float]] | None:
    """By id, those of each token and of the likeliest beside it."""
    if output.logprobs is None:
        return None
    return [{t: one.logprob for t, one in row.items()} for row in output.logprobs]


def run_scenario(llm: LLM, requests: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """For each request its outputs' token ids, and their logprobs."""
    engine, found = llm.llm_engine, {}
    for number, request in enumerate(requests):
        prompt = {"prompt_token_ids": request["prompt"]}
        engine.add_request(str(number), prompt, sampling(request))
    while engine.has_unfinished_requests():
        found |= {output.request_id: output.outputs for output in engine.step()}
    ordered = [found[str(number)] for number in range(len(requests))]
    return {
        "tokens": [[list(one.token_ids) for one in outputs] for outputs in ordered],
        "logprobs": [[logprobs(one) for one in outputs] for outputs in ordered],
    }


def run(job: dict[str, Any]) -> dict[str, Any]:
    if job["async_scheduling"]:
        force_async_scheduling()
    llm = LLM(**engine_arguments(job))
    worker = llm.collective_rpc(lambda worker: worker)[0]
    runner = worker.model_runner
    graphs = record_graphs(worker) if job["record_graphs"] else None
    kept = KeptDrafts(runner)
    scenarios = {
        name: run_scenario(llm, requests) for name, requests in job["scenarios"].items()
    }
    return {
        **describe(runner),
        "scheduler": type(llm.llm_engine.engine_core.engine_core.scheduler).__name__,
        "replays": graphs.replayed if graphs else {},
        "scenarios": scenarios,
        "counters": {name: values[0] for name, values in counters(llm).items()},
        "verified_drafts": kept.verified,
        "strange_drafts": kept.strange,
        "undrawn_drafts": kept.undrawn,
        "verified_after_a_wait": kept.waited,
        "verified_in_another_row": kept.moved,
    }


if __name__ == "__main__":
    job_file, result_file = map(Path, sys.argv[1:])
    result_file.write_text(json.dumps(run(json.loads(job_file.read_text()))))
