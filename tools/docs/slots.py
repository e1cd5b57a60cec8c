# SPDX-License-Identifier: Apache-2.0
"""The slots of a request, mode by mode, from the layout that the engine uses."""

import importlib.util
import sys
from dataclasses import dataclass
from types import ModuleType

from . import ROOT

LAYOUT = ROOT / "vllm/v1/worker/gpu/spec_decode/unified/layout.py"


def _load_layout() -> ModuleType:
    """The layout alone: it is plain Python, and importing vLLM takes seconds."""
    spec = importlib.util.spec_from_file_location("draft_layout", LAYOUT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where a dataclass looks itself up
    spec.loader.exec_module(module)
    return module


DraftLayout = _load_layout().DraftLayout


@dataclass(frozen=True)
class Mode:
    """A row of the modes page.

    Attributes:
        name: of its picture's file.
        title: what it is called.
        layout: its numbers, with the drafts that its picture shows.
        takes_hidden: whether it is fed the target's hidden states.
    """

    name: str
    title: str
    layout: DraftLayout
    takes_hidden: bool = False


MODES = (
    Mode("draft-model", "Draft model", DraftLayout(4, 0)),
    Mode("pard", "PARD", DraftLayout(4, 0, 4)),
    Mode("pard-2", "PARD-2", DraftLayout(4, 0, 4), takes_hidden=True),
    Mode("eagle", "EAGLE, EAGLE-3", DraftLayout(4, 1), takes_hidden=True),
    Mode("p-eagle", "P-EAGLE", DraftLayout(4, 1, 4), takes_hidden=True),
    Mode("blocks", "PARD in blocks of two", DraftLayout(4, 0, 2)),
)
# The step that all pictures show: 5 target tokens, 2 of them rejected.
NUM_TARGET_TOKENS, NUM_REJECTED = 5, 2
TARGET, NEXT, DRAFT, MASK, PADDING = "target", "next", "draft", "mask", "padding"
REJECTED = "rejected"


@dataclass(frozen=True)
class Slot:
    """One slot of a draft batch.

    Attributes:
        kind: TARGET, NEXT, DRAFT, MASK, PADDING, or REJECTED in a verified batch.
        token: index of a target token or number of a draft; 0 for the other kinds.
        position: in the sequence, where that of the step's first token is 0.
        draft: number of the draft that is sampled here; None if none is.
    """

    kind: str
    token: int
    position: int
    draft: int | None = None


def verified() -> list[Slot]:
    """The target's batch, from which the first pass is laid out."""
    valid = NUM_TARGET_TOKENS - NUM_REJECTED
    kinds = [TARGET] * valid + [REJECTED] * NUM_REJECTED
    return [Slot(kind, at, at) for at, kind in enumerate(kinds)]


def first_pass(mode: Mode) -> list[Slot]:
    """A request's slots in the first pass of the step that pictures show."""
    layout, valid = mode.layout, NUM_TARGET_TOKENS - NUM_REJECTED
    # Fed hidden states, yet not shifted: what slot 0 is fed was in the step before.
    first_new = 1 if mode.takes_hidden and not layout.token_shift else 0
    sampled = valid - layout.token_shift
    samples = layout.samples_per_pass(layout.num_speculative_tokens)[0]
    slots = []
    for slot in range(NUM_TARGET_TOKENS + layout.num_extra_slots):
        at = slot + layout.token_shift
        kind = TARGET if at < valid else NEXT if at == valid else MASK
        if slot < first_new or at >= valid + samples:
            kind = PADDING
        draft = slot - sampled + 1 if sampled <= slot < sampled + samples else None
        slots.append(Slot(kind, at if kind == TARGET else 0, slot, draft))
    return slots


def later_pass(layout: DraftLayout, draft_pass: int, start: int) -> list[Slot]:
    """A request's slots in pass `draft_pass`, from 1 on.

    Args:
        start: position of the first pass's first sampled slot.
    """
    width, k = layout.parallel_width, layout.num_speculative_tokens
    samples = layout.samples_per_pass(k)[draft_pass]
    done = draft_pass * width  # drafts before this pass
    slots = []
    for slot in range(layout.num_follow_slots):
        kind = DRAFT if slot < width else MASK
        if slot >= width + samples - 1:
            kind = PADDING
        is_sampled = width - 1 <= slot < width - 1 + samples
        draft = done + slot - width + 2 if is_sampled else None
        token = done - width + slot + 1 if kind == DRAFT else 0
        slots.append(Slot(kind, token, start + done - width + 1 + slot, draft))
    return slots


def passes(mode: Mode) -> list[list[Slot]]:
    """The slots of every pass of the step that pictures show."""
    layout = mode.layout
    start = NUM_TARGET_TOKENS - NUM_REJECTED - layout.token_shift
    later = [later_pass(layout, at, start) for at in range(1, layout.num_passes)]
    return [first_pass(mode), *later]


def hidden_row(mode: Mode, column: int) -> int | None:
    """Which of the target's hidden states a slot of the first pass is fed, by row of
    the verified batch; None for the learned one."""
    layout, valid = mode.layout, NUM_TARGET_TOKENS - NUM_REJECTED
    row = column + layout.hidden_offset
    if row < valid:
        return row
    return None if layout.token_shift else valid - 1
