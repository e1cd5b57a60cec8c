# SPDX-License-Identifier: Apache-2.0
"""Which drafts that a grammar has invalidated are verified all the same."""

from types import SimpleNamespace

import pytest
import torch

from vllm.config.drafter import DrafterConfig
from vllm.v1.core.sched.excluded_drafts import keep_first_invalid
from vllm.v1.worker.gpu.spec_decode.verification import without_first_invalid

VOCAB, BANNED, NONE = 4, 3, -1


@pytest.mark.parametrize(
    ("drafts", "invalid", "expected"),
    [
        # Of the invalid drafts only the first is verified.
        ([[1, BANNED, BANNED]], [[0, 1, 1]], [[0, 0, 1]]),
        ([[BANNED, 1, 1]], [[1, 1, 1]], [[0, 1, 1]]),
        # A draft that the mask allows might be accepted, but later rows are not masked.
        ([[1, 2, 2]], [[0, 1, 1]], [[0, 1, 1]]),
        # -1 is not a draft.
        ([[1, NONE, NONE]], [[0, 1, 1]], [[0, 1, 1]]),
        # Each request has its own first one; valid drafts are unchanged.
        ([[1, BANNED], [BANNED, 1]], [[0, 1], [1, 1]], [[0, 0], [0, 1]]),
        ([[1, 2], [2, 1]], [[0, 0], [0, 0]], [[0, 0], [0, 0]]),
    ],
)
def test_first_invalid_draft_is_verified(
    drafts: list[list[int]], invalid: list[list[int]], expected: list[list[int]]
):
    """The first row of each request holds no draft."""
    tokens = [token for own in drafts for token in (0, *own)]
    # A prompt token precedes the rows that are sampled from.
    batch = SimpleNamespace(
        input_ids=torch.tensor([2, *tokens], dtype=torch.int32),
        logits_indices=torch.arange(1, len(tokens) + 1),
    )
    logits = torch.zeros(len(tokens), VOCAB)
    logits[:, BANNED] = -torch.inf
    rows = torch.tensor([flag for own in invalid for flag in (0, *own)]).bool()
    found = without_first_invalid(rows, logits, batch)
    assert found.int().tolist() == [flag for own in expected for flag in (0, *own)]


def scheduler_with(sampling: str, **request) -> SimpleNamespace:
    own = {
        "is_finished": lambda: False,
        "is_prefill_chunk": False,
        "use_structured_output": True,
        "spec_token_ids": [5],
    }
    drafter = DrafterConfig("draft_model", 3, is_unified=True)
    spec = SimpleNamespace(drafter=drafter, draft_sample_method=sampling)
    return SimpleNamespace(
        vllm_config=SimpleNamespace(speculative_config=spec),
        requests={"a": SimpleNamespace(**own | request)},
    )


@pytest.mark.parametrize(
    ("drafts", "sampling", "request_", "expected"),
    [
        ([5, 6, 7], "probabilistic", {}, [5, -1]),
        ([5], "probabilistic", {}, [5]),
        ([5, NONE, NONE], "probabilistic", {}, [5]),
        # Greedy drafts have no residual distribution to sample from.
        ([5, 6, 7], "greedy", {}, [5]),
        ([5, 6, 7], "probabilistic", {"use_structured_output": False}, [5]),
        ([5, 6], "probabilistic", {"is_prefill_chunk": True, "spec_token_ids": []}, []),
        ([5, 6], "probabilistic", {"is_finished": lambda: True}, [5]),
    ],
)
def test_placeholder_of_first_invalid_draft(drafts, sampling, request_, expected):
    scheduler = scheduler_with(sampling, **request_)
    drafted = SimpleNamespace(req_ids=["a", "gone"], draft_token_ids=[drafts, [1, 2]])
    keep_first_invalid(scheduler, drafted)
    assert scheduler.requests["a"].spec_token_ids == expected
