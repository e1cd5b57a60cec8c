# SPDX-License-Identifier: Apache-2.0
"""The drafter is built for its widest batch; the target's range is unchanged."""

from types import SimpleNamespace

from hypothesis import given, settings
from hypothesis import strategies as st

from vllm.v1.worker.gpu.spec_decode.unified.config import (
    attention_config,
    widened_config,
)
from vllm.v1.worker.gpu.spec_decode.unified.layout import DraftLayout


def engine_config(
    endpoints: list[int] | None, budget: int = 64, max_num_seqs: int = 8
) -> SimpleNamespace:
    return SimpleNamespace(
        scheduler_config=SimpleNamespace(
            max_num_batched_tokens=budget, max_num_seqs=max_num_seqs
        ),
        compilation_config=SimpleNamespace(
            compile_ranges_endpoints=endpoints,
            static_forward_context={},
            max_cudagraph_capture_size=None,
        ),
        model_config=SimpleNamespace(max_model_len=128),
        parallel_config=SimpleNamespace(tensor_parallel_size=2),
        speculative_config=SimpleNamespace(
            num_speculative_tokens=7,
            enforce_eager=False,
            draft_model_config=SimpleNamespace(max_model_len=32),
            draft_parallel_config=SimpleNamespace(tensor_parallel_size=1),
        ),
    )


@st.composite
def engines(draw) -> tuple[DraftLayout, int, int]:
    """A layout, max_num_seqs, and a token budget of at least one for each request."""
    k = draw(st.integers(1, 20))
    layout = DraftLayout(k, draw(st.integers(0, 1)), draw(st.integers(1, k)))
    n = draw(st.integers(1, 64))
    return layout, n, n + draw(st.sampled_from([0, 1, 7, 512]))


def widest_pass(layout: DraftLayout, query_lens: list[int]) -> int:
    """Slots of the widest pass, counted by the table in `layout.py`."""
    k, w, n = layout.num_speculative_tokens, layout.parallel_width, len(query_lens)
    first = sum(query_lens) + n * (w - layout.token_shift)
    return max([first] + [n * (2 * w - 1)] * (-(-k // w) - 1))


@settings(deadline=None)
@given(engines(), st.booleans(), st.booleans(), st.data())
def test_budget_and_compile_range_include_widest_batch(
    engine, has_smaller: bool, has_budget: bool, data: st.DataObject
):
    """Queries of a step have at least 1 token each, and at most the budget in total."""
    layout, most, budget = engine
    kept = [budget - 1] if has_smaller else []
    endpoints = kept + ([budget] if has_budget else []) or None
    config = engine_config(endpoints, budget, most)
    draft = widened_config(config, layout)
    widest = draft.scheduler_config.max_num_batched_tokens
    assert widest == widest_pass(layout, [1 + budget - most] + [1] * (most - 1))
    n = data.draw(st.integers(1, most))
    left, query_lens = budget - n, []
    for _ in range(n):
        query_lens.append(1 + data.draw(st.integers(0, left)))
        left -= query_lens[-1] - 1
    assert widest_pass(layout, query_lens) <= widest
    assert draft.compilation_config.compile_ranges_endpoints == [*kept, widest]
    # The target's config is unchanged, and both share one forward context.
    assert config.scheduler_config.max_num_batched_tokens == budget
    assert config.compilation_config.compile_ranges_endpoints == endpoints
    shared = config.compilation_config.static_forward_context
    assert draft.compilation_config.static_forward_context is shared


def test_attention_config_of_draft_model():
    layout = DraftLayout(7, 0, 7)
    engine = engine_config([64])
    view = attention_config(engine, layout)
    # Block tables extend past the target's longest sequence, not the draft model's.
    assert view.model_config.max_model_len == 128 + layout.num_room_tokens
    # A decode query of the first pass: K + 1 target tokens and the extra slots.
    assert view.speculative_config.num_speculative_tokens + 1 == 8 + 7
    assert engine.speculative_config.num_speculative_tokens == 7
    assert engine.speculative_config.draft_model_config.max_model_len == 32
    # The number of heads depends on the draft model's tensor parallel size.
    assert view.parallel_config.tensor_parallel_size == 1
    assert engine.parallel_config.tensor_parallel_size == 2
