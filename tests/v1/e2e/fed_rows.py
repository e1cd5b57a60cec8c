# SPDX-License-Identifier: Apache-2.0
"""What each slot of PARD-2 is fed, bit by bit.

The target's states are replaced by ones with a single 1, at a place that token and
position decide. A projected state then is a column of the weight, and no sum rounds.
"""

from inspect import signature
from typing import Any

import torch


def place(token: int, position: int, width: int) -> int:
    return (31 * token + 7 * position) % width


class FedRows:
    """Stands before the speculator's `propose` and where a first pass is fed.

    Attributes:
        rows: request, position of a slot, that of the slot of the next token, and the
            place of the 1 in the state that the slot is fed: -1 for a state of zeros,
            None for what is no state's.
    """

    def __init__(self, runner: Any) -> None:
        speculator, self.drafter = runner.speculator, runner.speculator.drafter
        self.width = speculator.target_config.model_config.get_hidden_size()
        self.propose, self.inputs = speculator.propose, self.drafter.model_inputs
        self.target_hidden = self.drafter.target_hidden
        self.signature = signature(self.propose)
        self.rows: list[tuple[str, int, int, int | None]] = []
        self.batch, self.rejected = None, []
        speculator.propose = self._propose
        self.drafter.model_inputs = self._model_inputs
        self.drafter.target_hidden = self._target_hidden
        self.columns = self._columns()

    def _columns(self) -> dict[bytes, int]:
        last = self.drafter.features.layers.index(self.drafter.features.depth)
        block = self.drafter.weight[:, last * self.width : (last + 1) * self.width]
        columns = {row.numpy().tobytes(): i for i, row in enumerate(block.T.cpu())}
        assert len(columns) == self.width
        return columns | {torch.zeros(len(block)).numpy().tobytes(): -1}

    def _propose(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        given = self.signature.bind(*args, **kwargs).arguments
        self.batch = None if given.get("dummy_run") else given["input_batch"]
        self.rejected = given["num_rejected"].tolist()
        drafts = self.propose(*args, **kwargs)
        self.batch = None
        return drafts

    def _target_hidden(self, last: torch.Tensor, aux: list[torch.Tensor]) -> Any:
        if self.batch is not None:
            ids, positions = self.batch.input_ids, self.batch.positions
            at = place(ids[: len(last)].long(), positions[: len(last)], self.width)
            last = torch.zeros_like(last).scatter_(1, at[:, None], 1)
            aux = [torch.zeros_like(states) for states in aux]
        return self.target_hidden(last, aux)

    def _model_inputs(
        self, buffers: Any, num_tokens: int, is_first: bool, mode: Any
    ) -> Any:
        if is_first and self.batch is not None:
            self._note(buffers)
        return self.inputs(buffers, num_tokens, is_first, mode)

    def _note(self, buffers: Any) -> None:
        starts = buffers.batch.query_start_loc.tolist()
        slots = buffers.batch.slot_mappings[self.drafter.kv_group].tolist()
        verified = self.batch.query_start_loc.tolist()
        for number, name in enumerate(self.batch.req_ids):
            first = int(self.batch.positions[verified[number]])
            valid = verified[number + 1] - verified[number] - self.rejected[number]
            for row in range(starts[number], starts[number + 1]):
                if slots[row] >= 0:
                    fed = buffers.fed[row].cpu().numpy().tobytes()
                    at = int(buffers.batch.positions[row]), first + valid
                    request = name.partition("-")[0]
                    self.rows.append((request, *at, self.columns.get(fed)))

    def take(self) -> list[tuple[str, int, int, int | None]]:
        taken, self.rows = self.rows, []
        return taken
