# SPDX-License-Identifier: Apache-2.0
"""The drafter is built for its widest batch; the target keeps its own range."""

from types import SimpleNamespace

import pytest

from vllm.v1.worker.gpu.spec_decode.unified.draft_config import (
    attention_config,
    draft_lengths,
    widened_config,
)
from vllm.v1.worker.gpu.spec_decode.unified.layout import DraftLayout


def engine_config(endpoints: list[int] | None) -> SimpleNamespace:
    return SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_batched_tokens=64, max_num_seqs=8),
        compilation_config=SimpleNamespace(
            compile_ranges_endpoints=endpoints,
            static_forward_context={},
            max_cudagraph_capture_size=None,
        ),
        model_config=SimpleNamespace(max_model_len=128),
        speculative_config=SimpleNamespace(
            num_speculative_tokens=7,
            enforce_eager=False,
            draft_model_config=SimpleNamespace(max_model_len=32),
        ),
    )


@pytest.mark.parametrize("shift, width", [(0, 1), (0, 7), (1, 1), (1, 7), (1, 4)])
@pytest.mark.parametrize(
    "endpoints, kept", [([64], []), ([16, 64], [16]), ([16], [16]), (None, [])]
)
def test_budget_and_compile_range_reach_the_widest_batch(
    shift: int, width: int, endpoints: list[int] | None, kept: list[int]
):
    layout = DraftLayout(7, shift, width)
    widest = layout.max_num_tokens(64, 8)
    engine = engine_config(endpoints)
    draft = widened_config(engine, layout)
    assert draft.scheduler_config.max_num_batched_tokens == widest
    assert draft.compilation_config.compile_ranges_endpoints == [*kept, widest]
    # The target's are untouched, and layers register in one place.
    assert engine.scheduler_config.max_num_batched_tokens == 64
    assert engine.compilation_config.compile_ranges_endpoints == endpoints
    shared = engine.compilation_config.static_forward_context
    assert draft.compilation_config.static_forward_context is shared


def test_attention_is_built_for_the_draft_model():
    layout = DraftLayout(7, 0, 7)
    engine = engine_config([64])
    view = attention_config(engine, layout)
    # Block tables reach past the target's longest sequence, not the draft's.
    assert view.model_config.max_model_len == 128 + layout.num_room_tokens
    # A decode query of the first pass: K + 1 target tokens and the extra slots.
    assert view.speculative_config.num_speculative_tokens + 1 == 8 + 7
    assert engine.speculative_config.num_speculative_tokens == 7
    assert engine.speculative_config.draft_model_config.max_model_len == 32


@pytest.mark.parametrize(
    "schedule, expected", [(None, [7]), ([(1, 4, 7), (5, 8, 3)], [3, 7])]
)
def test_lengths_that_a_step_may_ask_for(schedule, expected):
    engine = engine_config([64])
    spec = engine.speculative_config
    spec.num_speculative_tokens_per_batch_size = schedule
    spec.uses_dynamic_speculative_decoding = lambda: schedule is not None
    # Some releases may ask for none, whatever the settings.
    assert [k for k in draft_lengths(engine) if k > 0] == expected
