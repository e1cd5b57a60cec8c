# SPDX-License-Identifier: Apache-2.0
"""An engine of several ranks, or one of several ranks: `ranks_job.py JOB RESULT`.

Its workers may be processes of their own, so nothing but outputs and counters is known
of them.
"""

import json
import sys
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams


def count_idle_batches(worker: Any) -> None:
    worker.idle_batches, run = 0, worker.execute_dummy_batch

    def counted() -> None:
        worker.idle_batches += 1
        run()

    worker.execute_dummy_batch = counted


def run(job: dict[str, Any]) -> dict[str, Any]:
    llm = LLM(disable_log_stats=False, **job["engine"])
    if job["counts_idle_batches"]:
        llm.collective_rpc(count_idle_batches)
    sampling = SamplingParams(
        temperature=0, max_tokens=job["max_tokens"], ignore_eos=True
    )
    prompts = [{"prompt_token_ids": ids} for ids in job["prompts"]]
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    found = {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()}
    idle = [0]
    if job["counts_idle_batches"]:
        idle = llm.collective_rpc(lambda worker: worker.idle_batches)
    return {
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        "drafts": found["vllm:spec_decode_num_drafts"],
        "accepted": found["vllm:spec_decode_num_accepted_tokens"],
        "idle_batches": idle[0],
    }


if __name__ == "__main__":
    job_file, result_file = map(Path, sys.argv[1:])
    result_file.write_text(json.dumps(run(json.loads(job_file.read_text()))))
