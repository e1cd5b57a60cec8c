# SPDX-License-Identifier: Apache-2.0
"""An engine that runs rounds of requests. The scheduler is in the same process, so that
it can be told how much to draft."""

import time
from collections import deque
from dataclasses import dataclass, field
from itertools import cycle
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

import psutil
import torch
from torch.utils._pytree import tree_leaves as leaves

from vllm import LLM, SamplingParams
from vllm.benchmarks.drafters.turns import Turns
from vllm.engine.arg_utils import EngineArgs
from vllm.outputs import CompletionOutput
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind

COUNTERS = "vllm:spec_decode_num_"
DRAFTED = "draft_tokens_per_pos"


@dataclass
class Answer:
    """The output of one request.

    Attributes:
        begin: when the request was added, in seconds.
        times: when its first and its latest tokens came.
        logprobs: by token id, for each of `tokens`, if requested.
    """

    tokens: list[int] = field(default_factory=list)
    logprobs: list[dict[int, float]] = field(default_factory=list)
    begin: float = 0.0
    times: tuple[float, float] | None = None

    def take(self, output: CompletionOutput, now: float) -> None:
        self.tokens += output.token_ids
        for row in output.logprobs or ():
            self.logprobs.append({token: one.logprob for token, one in row.items()})
        if output.token_ids:
            self.times = (self.times or (now, now))[0], now

    @property
    def seconds(self) -> float:
        return self.times[1] - self.begin

    @property
    def tpot_s(self) -> float | None:
        """Seconds per token after the first; None without any."""
        if self.times is None or len(self.tokens) < 2:
            return None
        return (self.times[1] - self.times[0]) / (len(self.tokens) - 1)


@dataclass
class Round:
    """The results of a round of requests.

    Attributes:
        load: concurrency, the same from the first to the last.
        drafts: verified drafts, of one request and step each.
        accepted: draft tokens accepted.
        drafted: by position, verified drafts that had a token there.
        accepted_at: by position, of these, how many had it accepted.
    """

    answers: list[Answer]
    load: int
    drafts: int
    accepted: int
    drafted: list[int]
    accepted_at: list[int]

    @property
    def tokens_per_s(self) -> float:
        """By Little's law: since a request starts whenever one ends, the requests that
        end per second are the concurrency over the mean seconds of a request."""
        tokens = sum(len(answer.tokens) for answer in self.answers)
        return self.load * tokens / sum(answer.seconds for answer in self.answers)

    @property
    def tpot_s(self) -> float | None:
        """Median over requests; None if none has two tokens."""
        known = [a.tpot_s for a in self.answers if a.tpot_s is not None]
        return median(known) if known else None

    @property
    def acceptance_length(self) -> float | None:
        """Mean accepted tokens of a draft, plus one; None without any."""
        return 1 + self.accepted / self.drafts if self.drafts else None


Asked = tuple[list[int], dict[str, Any]]  # a prompt, and how to sample


def _shorter(asked: list[Asked]) -> list[Asked]:
    """The same requests with outputs up to half as long, which end at equal intervals:
    those that follow then overlap with each other by half of their time or more."""
    count = 2 * len(asked)
    return [
        (prompt, {**how, "max_tokens": -(-how["max_tokens"] * at // count)})
        for at, (prompt, how) in enumerate(asked, 1)
    ]


class Engine:
    """Runs rounds of requests on an LLM in this process.

    Args:
        pipe: see `Turns`.
    """

    def __init__(self, engine_args: EngineArgs, pipe: Connection):
        begin, self.pipe = time.perf_counter(), pipe
        self.llm = LLM.from_engine_args(engine_args)
        self.start_s = time.perf_counter() - begin
        self.scheduler = self.llm.llm_engine.engine_core.engine_core.scheduler
        policy = self.scheduler.step_drafts.policy
        self._verifier = policy and policy.chooser.verifier
        self.num_requests = 0

    def describe(self) -> dict[str, Any]:
        """Seconds to start, memory of all ranks, and dtype."""
        return {
            "start_s": self.start_s,
            "memory_bytes": sum(self.llm.collective_rpc(memory_bytes)),
            "dtype": str(self.llm.llm_engine.model_config.dtype).rpartition(".")[2],
        }

    def run(
        self,
        prompts: list[list[int]],
        sampling: list[dict[str, Any]],
        load: int,
        told: int | None = None,
        staggered: bool = False,
        in_turns: bool = False,
    ) -> Round:
        """Runs all requests, `load` at a time.

        Args:
            told: draft length, instead of the engine's choice; None: it chooses.
            staggered: begin them one after the other, as requests do that are served:
                else none has to wait for the prompt of another.
            in_turns: with another engine; see `take_turns`.
        """
        self._tell(told)
        load, turns = min(load, len(prompts)), Turns(self.pipe if in_turns else None)
        asked = list(zip(prompts, sampling, strict=True))
        ahead = _shorter(asked[:load]) if staggered and load > 1 else []
        before = self._counters()
        answers = self._answer(ahead, asked, load, turns)
        after = self._counters()
        counted = [
            [new - old for new, old in zip(*both, strict=True)]
            for both in zip(after, before, strict=True)
        ]
        (drafts, accepted), drafted, accepted_at = counted
        return Round(answers, load, drafts, accepted, drafted, accepted_at)

    def end(self) -> None:
        """Ends its workers; one in this process ends with it, which is faster."""
        if self.llm.llm_engine.vllm_config.parallel_config.world_size > 1:
            self.llm.llm_engine.engine_core.engine_core.model_executor.shutdown()

    def _tell(self, told: int | None) -> None:
        if (policy := self.scheduler.step_drafts.policy) is not None:
            policy.chooser.fixed = told
            policy.chooser.verifier = self._verifier if told is None else None

    def _counters(self) -> tuple[list[int], list[int], list[int]]:
        """Numbers of drafts and accepted tokens; tokens verified, and accepted, by
        position."""
        found: dict[str, Any] = {}
        drafted: dict[int, int] = {}
        for metric in self.llm.get_metrics():
            if (name := metric.name.removeprefix(COUNTERS)) == DRAFTED:
                drafted[int(metric.labels["position"])] = metric.value
            elif name != metric.name:
                found[name] = metric
        if not found:
            return [0, 0], [], []
        totals = [found[name].value for name in ("drafts", "accepted_tokens")]
        accepted_at = found["accepted_tokens_per_pos"].values
        return totals, [drafted[i] for i in range(len(accepted_at))], accepted_at

    def _answer(
        self, ahead: list[Asked], asked: list[Asked], load: int, turns: Turns
    ) -> list[Answer]:
        """The outputs of `asked`, which begin as those `ahead` end. As a request ends
        another starts, from the first again if none is left, so that concurrency stays
        the same until the last one has finished."""
        engine = self.llm.llm_engine
        answers: dict[str, Answer] = {}
        running: set[str] = set()
        waiting, following = deque(ahead), cycle(asked)
        while len(answers) < len(asked) or running & answers.keys():
            while len(running) < load:
                name, self.num_requests = f"{self.num_requests}", self.num_requests + 1
                running.add(name)
                is_asked = not waiting and len(answers) < len(asked)
                if is_asked:
                    answers[name] = Answer(begin=turns.now())
                self._add(name, *(waiting.popleft() if waiting else next(following)))
            outputs, now = engine.step(), turns.now()
            for output in outputs:
                if (answer := answers.get(output.request_id)) is not None:
                    answer.take(output.outputs[0], now)
                if output.finished:
                    running.remove(output.request_id)
            turns.end_step()
        engine.abort_request(list(running))
        return list(answers.values())

    def _add(self, name: str, prompt: list[int], sampling: dict[str, Any]) -> None:
        kind = RequestOutputKind.DELTA
        params = SamplingParams(**sampling, detokenize=False, output_kind=kind)
        request = {"prompt_token_ids": prompt}
        self.llm.llm_engine.add_request(name, request, params)


def memory_bytes(worker: Any) -> int:
    """Device memory of a worker without its KV cache; on a CPU, with it."""
    if current_platform.is_cpu():
        return psutil.Process().memory_info().rss
    # Layers may share one allocation; some have several.
    caches = (
        cache.untyped_storage() for cache in leaves(worker.model_runner.kv_caches)
    )
    sizes = {cache.data_ptr(): cache.nbytes() for cache in caches}
    return torch.accelerator.memory_reserved() - sum(sizes.values())
