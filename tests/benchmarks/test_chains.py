# SPDX-License-Identifier: Apache-2.0
"""Our launch and the base's chains lay out the same batch."""

import pytest
import torch

from vllm.platforms import current_platform

if current_platform.is_cpu():
    import vllm.v1.worker.cpu.shm  # noqa: F401  (what Runner V2 needs on a CPU)

from benchmarks.spec_decode.chains import BaseV1, BaseV2, Ours, make_chain
from benchmarks.spec_decode.decode_step import DecodeStep, bytes_moved, make_step
from vllm.v1.worker.gpu.spec_decode.unified.layout import DraftLayout

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
K = 3


@pytest.fixture
def step() -> DecodeStep:
    torch.manual_seed(0)
    return make_step(4, K, 32, 6, DEVICE)


@pytest.mark.parametrize("mode", ["draft", "pard", "eagle3", "peagle"])
def test_first_pass(mode: str, step: DecodeStep):
    ours = Ours(step, mode, K)
    base_v1 = BaseV1(step, mode, K)
    for chain in (ours.first(), base_v1.first()):
        chain()
    bases = [base_v1.drafter]
    if mode in ("draft", "eagle3"):
        base_v2 = BaseV2(step, mode, K)
        base_v2.first()()
        bases.append(base_v2 if mode == "draft" else base_v2.buffers)
    rows = live_rows(ours)
    for base in bases:
        ids = base.ids if isinstance(base, BaseV2) else base.input_ids
        assert torch.equal(ours.buffers.batch.input_ids[rows], ids[rows])
        assert torch.equal(ours.buffers.batch.positions[rows], base.positions[rows])


def live_rows(ours: Ours) -> torch.Tensor:
    """The rows that hold a token or a mask."""
    step, layout = ours.step, ours.layout
    width = step.query_len + layout.num_extra_slots
    valid = step.query_len - step.num_rejected + layout.num_extra_slots
    slots = torch.arange(width, device=DEVICE)
    rows = torch.arange(step.num_reqs, device=DEVICE)[:, None] * width + slots
    return rows[slots < valid[:, None]]


@pytest.mark.parametrize("mode", ["draft", "eagle3"])
def test_later_pass(mode: str, step: DecodeStep):
    ours, base = Ours(step, mode, K), BaseV2(step, mode, K)
    calls = ours.later(), base.later()
    # The base's EAGLE chain begins at the end of the pass before; a draft model's at
    # the position before the next one.
    positions = ours.buffers.batch.first_positions[: step.num_reqs]
    base.buffers.positions[: step.num_reqs] = positions
    for call in calls:
        call()
    n = step.num_reqs
    assert torch.equal(ours.buffers.batch.positions[:n], base.buffers.positions[:n])


def test_pard2_is_laid_out_as_pard_and_fed(step: DecodeStep):
    ours, pard = Ours(step, "pard2", K), Ours(step, "pard", K)
    for chain in (ours.first(), pard.first()):
        chain()
    rows = live_rows(ours)
    for name in ("input_ids", "positions"):
        assert torch.equal(
            getattr(ours.buffers.batch, name)[rows],
            getattr(pard.buffers.batch, name)[rows],
        )
    # The first request's second token is fed the state of its first.
    assert torch.equal(ours.buffers.fed[1], step.aux[0][0])


def test_there_is_no_chain_that_the_base_lacks(step: DecodeStep):
    assert make_chain("base-v1", "pard2", "first", step, K) is None
    assert make_chain("base-v2", "pard", "first", step, K) is None
    assert make_chain("ours", "pard", "later", step, K) is None
    assert make_chain("base-v1", "draft", "later", step, K) is None


def test_bytes_moved_by_hand():
    """PARD, K = 2, one request: 3 target tokens become 5 rows, 2 of them sampled."""
    small = 4 * 3 + 4 * 5 + 36 + 5 * 20 + 2 * 24 + 8
    assert bytes_moved(DraftLayout(2, 0, 2), 1, 3, 0) == small
    shifted = bytes_moved(DraftLayout(2, 1, 2), 1, 3, 100)
    assert shifted == small - 4 - 20 + (3 + 4) * 100
