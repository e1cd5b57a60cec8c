# SPDX-License-Identifier: Apache-2.0
"""Records and checks of an engine's steps; see `engine_job.py`.

Each class takes the engine's worker, and wraps some of its methods.
"""

import traceback
from collections.abc import Callable
from functools import partial, wraps
from inspect import signature
from typing import Any, NamedTuple

import torch
from noise import noised

# Tolerance between float32 on the device and float64 here.
CLOSE = 1e-3
WAIT = "called a synchronizing CUDA operation"
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


class DraftRecord:
    """Records drafts: request, number of known tokens before them, and tokens."""

    def __init__(self, worker: Any) -> None:
        self.rows: list[tuple[str, int, list[int]]] = []
        around(worker.model_runner.speculator, "propose", after=self._note)

    def _note(self, given: Given, drafts: torch.Tensor) -> None:
        # From 0.33.0 on it is 0 if no request can use drafts.
        asked = given.get("num_speculative_tokens")
        if given.get("dummy_run") or asked == 0:
            return
        made = drafts[:, :asked].tolist()
        self.rows += [
            (name.partition("-")[0], known, made[row])
            for row, name, known in drafting(given)
        ]

    def take(self) -> list[tuple[str, int, list[int]]]:
        taken, self.rows = self.rows, []
        return taken


class Kept(NamedTuple):
    """A request's drafts as they were sampled."""

    row: int
    tokens: torch.Tensor  # [K]
    logits: torch.Tensor  # [K, V]


class KeptDrafts:
    """Checks that drafts are verified with the logits they were sampled from.

    Counts in `found`:
        verified: verified drafts.
        strange: verified requests whose drafts or logits had changed since.
        undrawn: drafts that do not follow from their logits and noise.
        waited: verified requests that were not in some step since drafting.
        moved: verified requests whose row in the batch has changed.
    """

    def __init__(self, worker: Any) -> None:
        runner = worker.model_runner
        self.speculator = runner.speculator
        self.drafted: dict[str, Kept] = {}
        self.left_out: set[str] = set()
        self.found = dict.fromkeys(
            ("verified", "strange", "undrawn", "waited", "moved"), 0
        )
        around(runner.speculator, "propose", after=self._keep)
        around(runner.rejection_sampler, "__call__", before=self._compare)

    def _keep(self, given: Given, drafts: torch.Tensor) -> None:
        if given.get("dummy_run"):
            return
        batch, logits = given["input_batch"], self.speculator.draft_logits
        self.left_out |= self.drafted.keys()
        self.left_out.difference_update(batch.req_ids)
        for row, name in enumerate(batch.req_ids):
            own = logits[int(batch.idx_mapping[row])].clone()
            self.drafted[name] = Kept(row, drafts[row].clone(), own)
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
            self.found["undrawn"] += bool(values[token] < values.max() - CLOSE)

    def _compare(self, given: Given) -> None:
        batch, logits = given["input_batch"], given["draft_logits"]
        ends = batch.query_start_loc[1:].tolist()
        for row, name in enumerate(batch.req_ids):
            count = int(batch.num_draft_tokens_per_req[row])
            if count == 0:
                continue
            kept = self.drafted[name]
            drafts = batch.input_ids[ends[row] - count : ends[row]]
            held = logits[int(batch.idx_mapping[row]), :count]
            same = torch.equal(drafts.long(), kept.tokens[:count])
            same = same and torch.equal(held, kept.logits[:count])
            self.found["verified"] += count
            self.found["strange"] += not same
            self.found["waited"] += name in self.left_out
            self.found["moved"] += row != kept.row


class HostWaits:
    """Records where drafting makes the host wait for the device; nothing on a CPU.

    `propose` runs in a mode in which synchronizing operations raise. If one does, its
    place is recorded, and `propose` is called again without that mode.
    """

    def __init__(self, worker: Any) -> None:
        self.found: set[str] = set()  # files and lines
        speculator = worker.model_runner.speculator
        if speculator.device.type == "cuda":
            self._check_that_waits_are_noticed()
            propose = speculator.propose
            speculator.propose = partial(self._call, propose)

    def _call(self, call: Callable[..., Any], *args: Any, **more: Any) -> Any:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return call(*args, **more)
        except RuntimeError as error:
            if WAIT not in str(error):
                raise
            frame = traceback.extract_tb(error.__traceback__)[-1]
            self.found.add(f"{frame.filename}:{frame.lineno}")
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return call(*args, **more)

    def _check_that_waits_are_noticed(self) -> None:
        self._call(torch.ones((), device="cuda").item)
        assert self.found, "torch.cuda.set_sync_debug_mode does not notice Tensor.item"
        self.found.clear()
