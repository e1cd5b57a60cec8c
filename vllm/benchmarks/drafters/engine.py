# SPDX-License-Identifier: Apache-2.0
"""An engine that runs rounds of requests. Its scheduler is in the same process, so that
concurrency can be set.

vLLM's release must be able to run this, too: nothing else of this tree is imported.
"""

import os
import time
from collections import defaultdict
from collections.abc import Sequence
from itertools import zip_longest
from statistics import median
from typing import Any, NamedTuple

import psutil
import torch
from torch.utils._pytree import tree_leaves

from vllm import LLM, SamplingParams
from vllm.benchmarks.drafters.processes import serve_engine
from vllm.outputs import CompletionOutput
from vllm.platforms import current_platform

COUNTERS = "vllm:spec_decode_num_"
Counts = dict[str, list[int]]


class Answer(NamedTuple):
    """An output; `logprobs` are by token id, for each of its tokens, if requested."""

    tokens: list[int]
    logprobs: Sequence[dict[int, float]] = ()

    @classmethod
    def of(cls, output: CompletionOutput) -> "Answer":
        rows = [row.items() for row in output.logprobs or ()]
        logprobs = [{token: each.logprob for token, each in row} for row in rows]
        return cls(list(output.token_ids), logprobs)


class Round(NamedTuple):
    """The results of a round of requests.

    Attributes:
        tpot_s: seconds per token after the first, median of the requests.
        counts: vLLM's counters of drafts, by name without `COUNTERS`: one value, or one
            for each position.
    """

    answers: list[Answer]
    tokens_per_s: float
    tpot_s: float
    counts: Counts


class Engine:
    """An LLM in this process.

    Args:
        engine: arguments of `LLM`.
    """

    def __init__(self, **engine: Any):
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        begin = time.perf_counter()
        self.llm = LLM(**engine)
        self.start_s = time.perf_counter() - begin
        self.scheduler = self.llm.llm_engine.engine_core.engine_core.scheduler

    def describe(self) -> dict[str, Any]:
        """Seconds to start, memory of all ranks, and dtype."""
        return {
            "start_s": self.start_s,
            "memory_bytes": sum(self.llm.collective_rpc(memory_bytes)),
            "dtype": str(self.llm.llm_engine.model_config.dtype).rpartition(".")[2],
        }

    def end(self) -> None:
        """Ends its workers; one in this process ends with it, which is faster."""
        if self.llm.llm_engine.vllm_config.parallel_config.world_size > 1:
            self.llm.llm_engine.engine_core.engine_core.model_executor.shutdown()

    def run(
        self, prompts: list[list[int]], sampling: dict[str, Any], load: int
    ) -> Round:
        """Runs a request for each prompt, `load` at a time: as one ends another starts.

        Args:
            sampling: arguments of `SamplingParams`.

        Returns:
            Tokens per second by Little's law: requests that end per second are the
            concurrency over the mean seconds of a request.
        """
        self.scheduler.max_num_active_reqs = load
        params, before = SamplingParams(**sampling, detokenize=False), self.counters()
        texts = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = self.llm.generate(texts, params, use_tqdm=False)
        answers = [Answer.of(output.outputs[0]) for output in outputs]
        lengths, stats = [len(a.tokens) for a in answers], [o.metrics for o in outputs]
        seconds = sum(one.last_token_ts - one.scheduled_ts for one in stats)
        tpots = [
            (one.last_token_ts - one.first_token_ts) / max(length - 1, 1)
            for one, length in zip(stats, lengths, strict=True)
        ]
        counts = {
            name: [b - a for a, b in zip_longest(before[name], after, fillvalue=0)]
            for name, after in self.counters().items()
        }
        tokens_per_s = min(load, len(prompts)) * sum(lengths) / seconds
        return Round(answers, tokens_per_s, median(tpots), counts)

    def counters(self) -> Counts:
        found: Counts = defaultdict(list)
        for metric in self.llm.get_metrics():
            if metric.name.startswith(COUNTERS):
                values = getattr(metric, "values", None) or [metric.value]
                found[metric.name.removeprefix(COUNTERS)] += values
        return found


def memory_bytes(worker: Any) -> int:
    """Device memory of a worker without its KV cache; on a CPU, with it."""
    if current_platform.is_cpu():
        return psutil.Process().memory_info().rss
    # Layers may share one allocation; some have several.
    caches = [c.untyped_storage() for c in tree_leaves(worker.model_runner.kv_caches)]
    sizes = {cache.data_ptr(): cache.nbytes() for cache in caches}
    return torch.accelerator.memory_reserved() - sum(sizes.values())


def serve(number: int) -> None:
    serve_engine(number, Engine)
