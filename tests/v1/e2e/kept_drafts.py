# SPDX-License-Identifier: Apache-2.0
"""Checks that drafts are drawn from, and verified against, the logits that are kept."""

from inspect import signature
from typing import Any, NamedTuple

import numpy as np
import torch

UINT = 0xFFFFFFFF
# Between float32 on a device and float64 here.
CLOSE = 1e-3


def keyed_noise(seed: int, position: int, vocab: int) -> np.ndarray:
    """[vocab] float64: what vLLM adds to logits / temperature to draw by a key.

    Gumbel noise of MurmurHash3 over four words: the seed's two, position and token.
    """
    hashed = np.zeros(vocab, np.uint64)
    for word in (seed & UINT, seed >> 32 & UINT, position & UINT, np.arange(vocab)):
        mixed = np.asarray(word, np.uint64) * 0xCC9E2D51 & UINT
        hashed ^= _rotated(mixed, 15) * 0x1B873593 & UINT
        hashed = _rotated(hashed, 13) * 5 + 0xE6546B64 & UINT
    hashed ^= 4 * 4  # bytes
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        hashed = (hashed ^ hashed >> shift) * factor & UINT
    uniform = (hashed + 0.5) / 2**32
    return -np.log(-np.log1p(-uniform))


def _rotated(words: np.ndarray, left: int) -> np.ndarray:
    return (words << left | words >> 32 - left) & UINT


def noised(
    logits: torch.Tensor, temperature: float, seed: int, position: int
) -> np.ndarray:
    """[V] float64, the largest of which is drawn after a position."""
    values = logits.double().cpu().numpy()
    if temperature == 0:
        return values
    return values / temperature + keyed_noise(seed, position, len(values))


class Kept(NamedTuple):
    """A request's drafts, as they were made."""

    row: int
    tokens: torch.Tensor  # [K]
    logits: torch.Tensor  # [K, V]


class KeptDrafts:
    """Stands around drafting and verification, and keeps by name what was drafted.

    Counts the drafts verified, the requests whose drafts met strange logits, and the
    drafts that do not follow from the logits kept of them. Of the requests verified it
    counts those that some step between had left out, and those that another row of the
    batch had drafted for.
    """

    def __init__(self, runner: Any) -> None:
        self.speculator = runner.speculator
        self.drafted: dict[str, Kept] = {}
        self.left_out: set[str] = set()
        self.verified = self.strange = self.undrawn = self.waited = self.moved = 0
        if self.speculator is not None and self.speculator.draft_logits is not None:
            self._wrap(runner.speculator, "propose", after=self._keep)
            self._wrap(runner.rejection_sampler, "__call__", before=self._compare)

    @property
    def found(self) -> dict[str, int]:
        names = ("verified", "strange", "undrawn", "waited", "moved")
        return {name: getattr(self, name) for name in names}

    def _wrap(self, owner: Any, name: str, before=None, after=None) -> None:
        """Replaced on the class: a call does not look at the instance."""
        owner = type(owner)
        call = getattr(owner, name)
        names = signature(call)

        def wrapped(*args, **kwargs):
            given = names.bind(*args, **kwargs).arguments
            if before is not None:
                before(given)
            result = call(*args, **kwargs)
            if after is not None:
                after(given, result)
            return result

        setattr(owner, name, wrapped)

    def _keep(self, given: dict[str, Any], drafts: torch.Tensor) -> None:
        if given.get("dummy_run"):
            return
        batch, logits = given["input_batch"], self.speculator.draft_logits
        self.left_out |= self.drafted.keys()
        self.left_out.difference_update(batch.req_ids)
        for row, name in enumerate(batch.req_ids):
            own = logits[int(batch.idx_mapping[row])].clone()
            self.drafted[name] = Kept(row, drafts[row].clone(), own)
            if given["num_sampled"][row] > 0:  # else a prompt is still being chunked
                self.undrawn += self._num_undrawn(given, row, self.drafted[name])

    def _num_undrawn(self, given: dict[str, Any], row: int, kept: Kept) -> int:
        batch = given["input_batch"]
        state = int(batch.idx_mapping[row])
        begin, end = batch.query_start_loc[row : row + 2].tolist()
        valid = end - begin - int(given["num_rejected"][row])
        # A draft's key is the position before its own: of the first, the last known.
        first = int(batch.positions[begin]) + valid
        temperature, seed = float(given["temperature"][state]), given["seeds"][state]
        asked, wrong = given.get("num_speculative_tokens"), 0
        for column, token in enumerate(kept.tokens[:asked].tolist()):
            values = noised(kept.logits[column], temperature, int(seed), first + column)
            wrong += bool(values[token] < values.max() - CLOSE)
        return wrong

    def _compare(self, given: dict[str, Any]) -> None:
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
            self.verified += count
            self.strange += not (same and torch.equal(held, kept.logits[:count]))
            self.waited += name in self.left_out
            self.moved += row != kept.row
