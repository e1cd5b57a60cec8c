# SPDX-License-Identifier: Apache-2.0
"""Records and checks of an engine's steps, for `VllmRunner.watch`.

A check fails the call that runs the step.
"""

from collections import Counter
from collections.abc import Callable
from functools import wraps
from inspect import signature
from typing import Any, NamedTuple

import torch

from .noise import noised
from .runner import Engine

# Tolerance between float32 on the device and float64 here.
CLOSE = 1e-3
Given = dict[str, Any]


def around(
    owner: Any,
    name: str,
    before: Callable[[Given], None] = lambda given: None,
    after: Callable[[Given, Any], None] = lambda given, result: None,
) -> None:
    """Calls `before` and `after` with the named arguments of each call of a method.

    The method is replaced on the class: `__call__` is not looked up on instances.
    """
    call = getattr(type(owner), name)
    names = signature(call)

    @wraps(call)
    def wrapped(*args, **kwargs):
        given = names.bind(*args, **kwargs).arguments
        before(given)
        result = call(*args, **kwargs)
        after(given, result)
        return result

    setattr(type(owner), name, wrapped)


def drafting(given: Given) -> list[tuple[int, str, int]]:
    """Requests that are drafted for: row, name, and number of known tokens."""
    batch = given["input_batch"]
    sampled, rejected = given["num_sampled"], given["num_rejected"]
    found = []
    for row, name in enumerate(batch.req_ids):
        if sampled[row] > 0:  # otherwise it is in chunked prefill
            begin, end = batch.query_start_loc[row : row + 2].tolist()
            valid = end - begin - int(rejected[row])
            found.append((row, name, int(batch.positions[begin]) + valid + 1))
    return found


class Drafts:
    """Records drafts, for `Served.drafts`."""

    def __init__(self, engine: Engine) -> None:
        self.rows: list[tuple[int, int, list[int]]] = []
        around(engine.speculator, "propose", after=self._note)

    def _note(self, given: Given, drafts: torch.Tensor) -> None:
        # It is 0 if no request can use drafts.
        asked = given.get("num_speculative_tokens")
        if given.get("dummy_run") or asked == 0:
            return
        made = drafts[:, :asked].tolist()
        self.rows += [
            (int(name.partition("-")[0]), known, made[row])
            for row, name, known in drafting(given)
        ]

    def take(self) -> list[tuple[int, int, list[int]]]:
        taken, self.rows = self.rows, []
        return taken


class Calls:
    """Counts calls of a method of one of the engine's parts; with `sets`, those whose
    result has a value there."""

    def __init__(
        self, engine: Engine, part: str, method: str, sets: str | None = None
    ) -> None:
        self.found, self.sets = 0, sets
        around(getattr(engine, part), method, after=self._count)

    def _count(self, _: Given, result: Any) -> None:
        self.found += self.sets is None or getattr(result, self.sets) is not None


class Kept(NamedTuple):
    """A request's drafts as they were sampled."""

    row: int
    tokens: torch.Tensor  # [K]
    logits: torch.Tensor  # [K, V]


class KeptDrafts:
    """Checks that drafts are verified with the logits they were sampled from.

    They must also follow from these logits and the noise. Counts in `found`:
        verified: verified drafts.
        waited: verified requests that were not in some step since drafting.
        moved: verified requests whose row in the batch has changed.
    """

    def __init__(self, engine: Engine) -> None:
        runner = engine.worker.model_runner
        self.speculator = runner.speculator
        self.drafted: dict[str, Kept] = {}
        self.left_out: set[str] = set()
        self.found = Counter()
        around(runner.speculator, "propose", after=self._keep)
        around(runner.rejection_sampler, "__call__", before=self._compare)

    def _keep(self, given: Given, drafts: torch.Tensor) -> None:
        if given.get("dummy_run"):
            return
        batch, logits = given["input_batch"], self.speculator.draft_logits
        self.left_out |= self.drafted.keys()
        self.left_out.difference_update(batch.req_ids)
        for row, name in enumerate(batch.req_ids):
            scores = logits[int(batch.idx_mapping[row])].clone()
            self.drafted[name] = Kept(row, drafts[row].clone(), scores)
        for row, name, known in drafting(given):
            self._check_draws(given, row, self.drafted[name], known)

    def _check_draws(self, given: Given, row: int, kept: Kept, known: int) -> None:
        state = int(given["input_batch"].idx_mapping[row])
        temperature, seed = float(given["temperature"][state]), given["seeds"][state]
        asked = given.get("num_speculative_tokens")
        for column, token in enumerate(kept.tokens[:asked].tolist()):
            # The key of a draft is the position before it.
            position = known - 1 + column
            values = noised(kept.logits[column], temperature, int(seed), position)
            assert values[token] > values.max() - CLOSE, "a draft is not the one drawn"

    def _compare(self, given: Given) -> None:
        batch, logits = given["input_batch"], given["draft_logits"]
        ends = batch.query_start_loc[1:].tolist()
        for row, name in enumerate(batch.req_ids):
            count = int(batch.num_draft_tokens_per_req[row])
            if count == 0:
                continue
            kept = self.drafted[name]
            drafts = batch.input_ids[ends[row] - count : ends[row]]
            scores = logits[int(batch.idx_mapping[row]), :count]
            assert torch.equal(drafts.long(), kept.tokens[:count]), "other drafts"
            assert torch.equal(scores, kept.logits[:count]), "logits of other drafts"
            self.found["verified"] += count
            self.found["waited"] += name in self.left_out
            self.found["moved"] += row != kept.row


def forbid_waits(engine: Engine) -> None:
    """Makes operations raise with which drafting waits for the device, if it is one."""
    speculator = engine.speculator
    if speculator.device.type != "cuda":
        return

    def without_waits(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **more: Any) -> Any:
            torch.cuda.set_sync_debug_mode("error")
            try:
                return call(*args, **more)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        return run

    try:
        without_waits(torch.ones((), device="cuda").item)()
    except RuntimeError:
        speculator.propose = without_waits(speculator.propose)
    else:
        raise AssertionError("Tensor.item is not noticed as a wait")
