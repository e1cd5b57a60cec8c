# SPDX-License-Identifier: Apache-2.0
"""Pictures of slots: true to the input kernel, and readable on light and dark pages."""

import re
from xml.etree import ElementTree

import pytest
import torch

from tests.v1.worker.gpu.spec_decode.prepare_inputs_reference import (
    prepare_inputs_reference,
)
from tools.docs import slots, svg
from tools.docs.slots import MODES, Mode, Slot
from vllm.platforms import current_platform
from vllm.v1.attention.backends.utils import PAD_SLOT_ID

if current_platform.is_cpu():
    import vllm.v1.worker.cpu.shm  # noqa: F401  (what Runner V2 needs on a CPU)

from vllm.v1.worker.gpu.block_table import BlockTables
from vllm.v1.worker.gpu.spec_decode.unified.buffers import DraftBuffers
from vllm.v1.worker.gpu.spec_decode.unified.inputs import (
    HiddenRows,
    PreviousPass,
    VerifiedBatch,
)

CPU = torch.device("cpu")
FIRST = 20  # position of the step's first token
TOKEN, NEXT, DRAFT, MASK, LEARNED = 100, 55, 200, 999, -1.0
MOST = 16  # slots


def verified() -> VerifiedBatch:
    """The step that the pictures show."""
    q, one = slots.NUM_TARGET_TOKENS, torch.ones(1, dtype=torch.int32)
    return VerifiedBatch(
        input_ids=torch.arange(TOKEN, TOKEN + q, dtype=torch.int32),
        positions=torch.arange(FIRST, FIRST + q),
        query_start_loc=torch.tensor([0, q], dtype=torch.int32),
        idx_mapping=torch.zeros(1, dtype=torch.int64),
        num_sampled=one,
        num_rejected=one * slots.NUM_REJECTED,
        last_sampled=torch.full((1, 1), NEXT),
        next_prefill_tokens=one,
        temperature=torch.zeros(1),
        seeds=torch.zeros(1, dtype=torch.int64),
    )


def lay_out(mode: Mode, draft_pass: int, buffers: DraftBuffers) -> None:
    layout = mode.layout
    tables = BlockTables([16], 1, MOST, [4], CPU)
    tables.block_tables[0].gpu[0] = torch.arange(1, 5)
    tables.num_blocks.np[0, 0] = 4
    tables.num_blocks.copy_to_uva()
    source, hidden = verified(), None
    if mode.takes_hidden:
        rows = torch.arange(float(MOST))[:, None]
        # One row for masks, or one for each KV block.
        stand_ins = torch.full((1,) if layout.token_shift else (5, 1), LEARNED)
        hidden = HiddenRows((rows,), stand_ins)
    if draft_pass:
        drafts = torch.arange(DRAFT + 1, DRAFT + 1 + layout.num_speculative_tokens)
        source = PreviousPass(drafts[None], draft_pass)
    prepare_inputs_reference(
        source,
        layout,
        buffers,
        tables,
        num_samples=layout.samples_per_pass(layout.num_speculative_tokens)[draft_pass],
        num_padded_tokens=MOST,
        limit=64,
        mask_token_id=MASK,
        hidden=hidden,
    )


def written(buffers: DraftBuffers, slot: int) -> tuple[int, int] | None:
    """Token and position of a slot; None for padding, which has no place in the KV."""
    if buffers.batch.slot_mappings[0, slot] == PAD_SLOT_ID:
        return None
    return int(buffers.batch.input_ids[slot]), int(buffers.batch.positions[slot])


def drawn(slot: Slot) -> tuple[int, int] | None:
    token = {
        slots.TARGET: TOKEN + slot.token,
        slots.NEXT: NEXT,
        slots.DRAFT: DRAFT + slot.token,
        slots.MASK: MASK,
    }.get(slot.kind)
    return None if token is None else (token, FIRST + slot.position)


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_pictures_show_what_the_kernel_writes(mode: Mode):
    layout = mode.layout
    size = 1 if mode.takes_hidden else None
    buffers = DraftBuffers(layout, MOST, 1, CPU, size, torch.float32)
    buffers.allocate_kv_groups(1)
    for draft_pass, row in enumerate(slots.passes(mode)):
        lay_out(mode, draft_pass, buffers)
        assert len(row) == int(buffers.batch.query_start_loc[1])
        assert [drawn(s) for s in row] == [written(buffers, i) for i in range(len(row))]
        sampled = [i for i, slot in enumerate(row) if slot.draft is not None]
        assert sampled == buffers.batch.sample_rows[: len(sampled)].tolist()
        before = draft_pass * layout.parallel_width
        drafts = [before + 1 + i for i in range(len(sampled))]
        assert [row[i].draft for i in sampled] == drafts
        if draft_pass == 0 and mode.takes_hidden:
            assert_hidden_states(mode, row, buffers)


def assert_hidden_states(mode: Mode, row: list[Slot], buffers: DraftBuffers) -> None:
    for column, slot in enumerate(row):
        text = svg.hidden_text(mode, slot, column)
        if text:
            fed = LEARNED if text == "learned" else float(text.removeprefix("h"))
            assert buffers.fed[column].item() == fed


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_pictures_are_whole(mode: Mode):
    """Well-formed, all within the frame, each class with a colour."""
    text = svg.picture(mode)
    root = ElementTree.fromstring(text)
    width, height = float(root.get("width")), float(root.get("height"))
    coloured = set(re.findall(r"^\.([a-z]+) \{ fill", text, re.MULTILINE))
    for element in root.iter():
        for name in (element.get("class") or "").split():
            assert name == "left" or name in coloured
        assert 0 <= float(element.get("x", 0)) + float(element.get("width", 0)) <= width
        assert 0 <= float(element.get("y", 0)) <= height
    assert svg.picture(mode) == text


def contrast(first: str, second: str) -> float:
    """WCAG's contrast ratio of two colours, from 1 to 21."""

    def luminance(colour: str) -> float:
        channels = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
        red, green, blue = (
            c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4
            for c in channels
        )
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    light, dark = sorted(map(luminance, (first, second)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("palette", [svg.LIGHT, svg.DARK], ids=["light", "dark"])
def test_text_is_readable(palette: dict[str, str]):
    for kind in svg.KINDS:
        assert contrast(palette["text"], palette[kind]) > 4.5
    for text in ("text", "beside"):
        assert contrast(palette[text], palette["ground"]) > 4.5
