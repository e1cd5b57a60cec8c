# SPDX-License-Identifier: Apache-2.0
"""A draft step, from the verified batch to its drafts, in plain tensors."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from vllm.v1.worker.gpu.spec_decode.unified import runner as runner_module
from vllm.v1.worker.gpu.spec_decode.unified.drafters.base import Drafter
from vllm.v1.worker.gpu.spec_decode.unified.inputs import (
    DraftBlockTables,
    DraftInputs,
    DraftLimits,
)
from vllm.v1.worker.gpu.spec_decode.unified.layout import DraftLayout, draft_plans
from vllm.v1.worker.gpu.spec_decode.unified.runner import DraftRunner
from vllm.v1.worker.gpu.spec_decode.unified.sampler import DraftSampler, SampledSlots
from vllm.v1.worker.gpu.spec_decode.unified.step import RequestStates, TargetStep
from vllm.v1.worker.gpu.spec_decode.unified.vocabulary import Vocabulary

from .batches import DEVICE, block_tables, int32, int64

MAX_MODEL_LEN, MASK, VOCAB = 64, 99, 100


class Counter(Drafter):
    """A draft model whose next token is the sum of its token and position."""

    model = staticmethod(
        lambda input_ids, positions: torch.stack([input_ids, positions], 1).float()
    )

    def __init__(self, layout: DraftLayout) -> None:
        self.layout = layout

    def load(self, *_: Any) -> None: ...

    def input_ids(self, inputs: DraftInputs, num_tokens: int) -> torch.Tensor:
        return inputs.batch.input_ids[:num_tokens]

    def model_inputs(self, inputs, num_tokens, is_first, mode) -> dict[str, Any]:
        return {
            "input_ids": self.input_ids(inputs, num_tokens),
            "positions": inputs.positions(num_tokens),
        }


class Base:
    """vLLM's side of a speculator: records what it is asked for."""

    dp_rank, dp_size, supports_decode_metadata_update = 0, 1, False
    kv_cache_config = vllm_config = None

    def __init__(self) -> None:
        self.metadata: list[dict[str, Any]] = []
        self.eplb: list[int] = []
        self._prepare_eplb_forward = self.eplb.append

    def _build_attn_metadata(self, num_reqs, graph, starts, seq_lens, **more) -> None:
        more |= {"seq_lens": seq_lens, "starts": starts, "rows": graph.num_tokens}
        self.metadata.append(more)


class Parts:
    """The parts of a draft step of up to four requests."""

    def __init__(self, monkeypatch, width: int, num_drafts: int = 7) -> None:
        layout = DraftLayout(num_drafts, 0, width)
        self.plan = draft_plans(layout, {num_drafts: num_drafts}, 4, DEVICE)[num_drafts]
        self.inputs = DraftInputs(layout, 64, 4, DEVICE)
        self.inputs.allocate_kv_groups(1)
        self.inputs.limits = DraftLimits(MASK, VOCAB, lambda: MAX_MODEL_LEN)
        self.inputs.tables = DraftBlockTables(
            block_tables([0] * 8, 4), layout.num_room_tokens, [0]
        )
        drafts = torch.zeros(4, num_drafts, dtype=torch.int64, device=DEVICE)
        self.sampler = DraftSampler(drafts, self.inputs, self.sample, 4)
        self.sampler.vocabulary = Vocabulary(VOCAB)
        self.base = Base()
        self.runner = DraftRunner(self.base, Counter(layout), self.inputs, self.sampler)
        for name in ("build_slot_mappings_by_layer", "set_forward_context"):
            monkeypatch.setattr(runner_module, name, lambda *_, **__: Nothing())

    @staticmethod
    def sample(slots: SampledSlots) -> torch.Tensor:
        return slots.hidden_states.sum(1).long() % VOCAB


class Nothing(dict):
    def __enter__(self) -> None: ...

    def __exit__(self, *_: Any) -> None: ...


def step_of(
    query_lens: list[int], starts: list[int], rejected: list[int]
) -> TargetStep:
    """A step of requests that have each sampled token 50, 51, …; tokens are 0, 1, …"""
    n, ends = len(query_lens), np.cumsum([0, *query_lens]).astype(np.int32)
    spans = zip(starts, query_lens, strict=True)
    positions = [at for start, count in spans for at in range(start, start + count)]
    batch = SimpleNamespace(
        num_reqs=n,
        num_tokens=int(ends[-1]),
        num_scheduled_tokens=np.array(query_lens),
        decode_graph_eligible=False,
        num_draft_tokens_per_req=None,
        query_start_loc_np=ends,
        query_start_loc=int32(ends.tolist()),
        seq_lens_cpu_upper_bound=torch.tensor(starts) + torch.tensor(query_lens),
        input_ids=int32(range(len(positions))),
        positions=int64(positions),
        idx_mapping=int64(range(n)),
    )
    states = RequestStates(
        int64([50, 51, 52, 53]),
        int32([0] * 4),
        torch.zeros(4, device=DEVICE),
        int64([0] * 4),
    )
    return TargetStep(
        batch,
        num_sampled=int32([1] * n),
        num_rejected=int32(rejected),
        requests=states,
        slot_mappings=int64([[0] * len(positions)]),
        last_hidden=torch.zeros(len(positions), 1, device=DEVICE),
        aux_hidden=None,
    )


@pytest.mark.parametrize("width", [1, 2, 3])
def test_drafts_of_two_requests(monkeypatch, width: int):
    """They continue from the tokens just sampled: 50 at position 12, as the last of the
    first request's four tokens was rejected, and 51 at position 4."""
    parts = Parts(monkeypatch, width, num_drafts=3)
    parts.runner.run(step_of([4, 1], [9, 3], [1, 0]), parts.plan, None)
    expected = []
    for token, position in ((50, 12), (51, 4)):
        drafts: list[int] = []
        while len(drafts) < 3:
            # Each pass samples at the last known token and at the masks after it.
            known = drafts[-1] if drafts else token
            for i, fed in enumerate([known] + [MASK] * (width - 1)):
                drafts.append(
                    (fed + position + len(drafts)) % VOCAB if i < width else 0
                )
        expected.append(drafts[:3])
    assert parts.sampler.drafts[:2].tolist() == expected


@pytest.mark.parametrize("width", [1, 4, 7])
def test_host_has_upper_bounds_of_sequence_lengths(monkeypatch, width: int):
    """Also near max_model_len, where padding slots extend past it."""
    parts = Parts(monkeypatch, width)
    layout = parts.plan.layout
    parts.runner.run(step_of([8], [MAX_MODEL_LEN - 8], [0]), parts.plan, None)
    assert len(parts.base.metadata) == layout.num_passes
    for draft_pass, asked in enumerate(parts.base.metadata):
        # As the input kernel computes them if nothing is rejected.
        longest = MAX_MODEL_LEN + layout.num_extra_slots
        if draft_pass:
            start = MAX_MODEL_LEN + 1 + (draft_pass - 1) * width
            longest = start + layout.num_follow_slots
        assert int(asked["seq_lens"][0]) + asked["step"] >= longest


def test_eplb_counts_only_real_tokens(monkeypatch):
    parts = Parts(monkeypatch, 7)
    sync = SimpleNamespace(
        num_tokens_across_dp=torch.tensor([20, 20]),
        num_reqs=2,
        uniform_token_count=None,
        eager=True,
    )
    parts.runner.run(step_of([8], [9], [0]), parts.plan, sync)
    real = 8 + parts.plan.layout.num_extra_slots
    assert parts.base.metadata[0]["rows"] > real  # padded for the other rank
    assert parts.base.eplb == [real]
