# SPDX-License-Identifier: Apache-2.0
"""How the input kernel is launched: how many programs, and which constants."""

import inspect
from math import prod
from typing import Any

import pytest
import torch

from vllm.platforms import current_platform

if current_platform.is_cpu():
    import vllm.v1.worker.cpu.shm  # noqa: F401  (what Runner V2 needs on a CPU)

from vllm.v1.worker.gpu.block_table import BlockTables
from vllm.v1.worker.gpu.spec_decode.unified import inputs
from vllm.v1.worker.gpu.spec_decode.unified.buffers import DraftBuffers
from vllm.v1.worker.gpu.spec_decode.unified.inputs import (
    HiddenRows,
    PreviousPass,
    VerifiedBatch,
    prepare_inputs,
)
from vllm.v1.worker.gpu.spec_decode.unified.layout import DraftLayout

CPU = torch.device("cpu")
MOST_REQS, MOST_TOKENS, HIDDEN = 64, 4096, 32
PARAMETERS = inspect.signature(inputs._prepare_inputs_kernel.fn).parameters
CONSTANTS = [
    name
    for name, parameter in PARAMETERS.items()
    if "constexpr" in str(parameter.annotation)
]


class Launches:
    """Stands in place of the kernel and notes what it is launched with."""

    def __init__(self) -> None:
        self.programs: list[int] = []
        self.constants: list[dict[str, Any]] = []

    def __getitem__(self, grid: tuple[int, ...]):
        self.programs.append(prod(grid))
        return lambda *_, **given: self.constants.append(
            {name: given[name] for name in CONSTANTS}
        )


@pytest.fixture
def launches(monkeypatch) -> Launches:
    found = Launches()
    monkeypatch.setattr(inputs, "_prepare_inputs_kernel", found)
    return found


class Drafter:
    """Launches passes of one layout and of its shorter steps."""

    def __init__(self, layout: DraftLayout, is_fed: bool) -> None:
        self.layout, self.is_fed = layout, is_fed
        size = HIDDEN if is_fed else None
        sizes = MOST_TOKENS, MOST_REQS, CPU, size, torch.float32
        self.buffers = DraftBuffers(layout, *sizes)
        self.buffers.allocate_kv_groups(1)
        self.tables = BlockTables([16], MOST_REQS, MOST_TOKENS, [4], CPU)

    def prepare(self, source, layout: DraftLayout, rows: int, hidden) -> None:
        prepare_inputs(
            source, layout, self.buffers, self.tables, num_samples=1, limit=64,
            num_padded_tokens=rows, hidden=hidden, native=False,
        )  # fmt: skip

    def hidden(self, rows: int) -> HiddenRows | None:
        if not self.is_fed:
            return None
        shape = (HIDDEN,) if self.layout.token_shift else (9, HIDDEN)
        sources, positions = (torch.zeros(rows, HIDDEN),), torch.zeros(9).long()
        return HiddenRows(sources, torch.zeros(shape), positions)

    def first(self, query_lens: list[int], num_drafts: int) -> None:
        layout, n = self.layout.for_drafts(num_drafts), len(query_lens)
        starts = torch.tensor([0, *query_lens]).cumsum(0).int()
        tokens, ones = int(starts[-1]), torch.ones(n, dtype=torch.int32)
        states = torch.zeros(MOST_REQS, dtype=torch.int64)
        batch = VerifiedBatch(
            torch.zeros(tokens, dtype=torch.int32), torch.arange(tokens), starts,
            torch.arange(n), ones, 0 * ones, states, states.int(), states.float(),
            states,
        )  # fmt: skip
        rows = tokens + n * layout.num_extra_slots
        self.prepare(batch, layout, rows, self.hidden(tokens))

    def later(self, num_reqs: int, num_drafts: int) -> None:
        layout = self.layout.for_drafts(num_drafts)
        drafts = torch.zeros(num_reqs, self.layout.num_speculative_tokens).long()
        rows = num_reqs * layout.num_follow_slots
        hidden = self.hidden(num_reqs * layout.parallel_width)
        self.prepare(PreviousPass(drafts, 1), layout, rows, hidden)


@pytest.mark.parametrize("is_fed", [False, True])
@pytest.mark.parametrize("shift", [0, 1])
def test_programs_follow_the_rows(launches: Launches, shift: int, is_fed: bool):
    """A long prompt does not multiply the programs of the requests beside it."""
    drafter = Drafter(DraftLayout(7, shift, 7), is_fed)
    prompt, decodes = [3000], [8] * (MOST_REQS - 1)
    for query_lens in (prompt, decodes, prompt + decodes):
        drafter.first(query_lens, 7)
    alone, beside, mixed = launches.programs
    assert mixed <= alone + beside


@pytest.mark.parametrize("is_fed", [False, True])
@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("width", [1, 4, 7])
def test_all_lengths_run_the_same_compiled_kernel(
    launches: Launches, width: int, shift: int, is_fed: bool
):
    """Else the first step that asks for a length compiles while it serves."""
    drafter = Drafter(DraftLayout(7, shift, width), is_fed)
    for num_drafts in range(8):
        drafter.first([8, 3, 1], num_drafts)
    assert all(found == launches.constants[0] for found in launches.constants)
    launches.constants.clear()
    for num_drafts in range(width + 1, 8):
        drafter.later(3, num_drafts)
    assert all(found == launches.constants[0] for found in launches.constants)
