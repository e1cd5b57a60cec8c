# SPDX-License-Identifier: Apache-2.0
"""Checks that drafts are verified against the logits that they were drawn from."""

from inspect import signature
from typing import Any

import torch


class KeptDrafts:
    """Stands around drafting and verification, and keeps by name what was drafted.

    Counts the drafts verified, and the requests whose drafts met strange logits.
    """

    def __init__(self, runner: Any) -> None:
        self.speculator = runner.speculator
        self.drafted: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        self.verified = self.strange = 0
        if self.speculator is not None and self.speculator.draft_logits is not None:
            self._wrap(runner.speculator, "propose", after=self._keep)
            self._wrap(runner.rejection_sampler, "__call__", before=self._compare)

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
        for row, name in enumerate(batch.req_ids):
            own = logits[int(batch.idx_mapping[row])].clone()
            self.drafted[name] = drafts[row].clone(), own

    def _compare(self, given: dict[str, Any]) -> None:
        batch, logits = given["input_batch"], given["draft_logits"]
        ends = batch.query_start_loc[1:].tolist()
        for row, name in enumerate(batch.req_ids):
            count = int(batch.num_draft_tokens_per_req[row])
            if count == 0:
                continue
            tokens, own = self.drafted[name]
            drafts = batch.input_ids[ends[row] - count : ends[row]]
            held = logits[int(batch.idx_mapping[row]), :count]
            same = torch.equal(drafts.long(), tokens[:count])
            self.verified += count
            self.strange += not (same and torch.equal(held, own[:count]))
