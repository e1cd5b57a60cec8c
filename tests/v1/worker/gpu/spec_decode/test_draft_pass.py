# SPDX-License-Identifier: Apache-2.0
"""A draft step, from the verified batch to its drafts, in plain tensors."""

from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from vllm.v1.worker.gpu.spec_decode.unified import runner as runner_module
from vllm.v1.worker.gpu.spec_decode.unified.drafters.draft_model import Drafter
from vllm.v1.worker.gpu.spec_decode.unified.inputs import (
    DraftBlockTables,
    DraftInputs,
    DraftLimits,
    TargetStep,
)
from vllm.v1.worker.gpu.spec_decode.unified.layout import DraftLayout
from vllm.v1.worker.gpu.spec_decode.unified.runner import DraftRunner
from vllm.v1.worker.gpu.spec_decode.unified.sampler import DraftSampler, Vocabulary

from .batches import DEVICE, block_tables, int32, int64, plan_of, verified_batch

MAX_MODEL_LEN, MASK, VOCAB = 64, 99, 100
# Of a verified batch, the fields of the target's, and those of a step.
OF_BATCH = "query_start_loc", "input_ids", "positions", "idx_mapping"
OF_REQUESTS = "num_sampled", "next_prefill_tokens", "temperature", "seeds"


class Counter(Drafter):
    """A draft model whose next token is the sum of its token and position."""

    model = staticmethod(
        lambda input_ids, positions: torch.stack([input_ids, positions], 1).float()
    )

    def __init__(self, layout: DraftLayout) -> None:
        self.layout, self.vocabulary = layout, Vocabulary(VOCAB)


class Base:
    """vLLM's side of a speculator: records what it is asked for, and what the device
    knows then."""

    dp_rank, dp_size, supports_decode_metadata_update = 0, 1, False
    kv_cache_config, vllm_config, max_model_len = None, None, MAX_MODEL_LEN + 16

    def __init__(self, inputs: DraftInputs) -> None:
        self.batch, self.eplb, self.rows = inputs.batch, [], []
        # [query_start_loc, upper bounds of lengths] of each pass: of host and device.
        self.told: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = []
        self._prepare_eplb_forward = self.eplb.append

    def _build_attn_metadata(
        self, n, graph, starts, seq_lens, *, step, slot_mappings
    ) -> None:
        self.rows.append(graph.num_tokens)
        known = self.batch.query_start_loc[: n + 1], self.batch.seq_lens[:n]
        told = torch.from_numpy(starts.copy()), seq_lens + step
        self.told.append((told, [each.cpu().clone() for each in known]))


class Parts:
    """The parts of a draft step of up to four requests."""

    def __init__(
        self, monkeypatch, width: int, num_drafts: int = 7, shift: int = 0
    ) -> None:
        layout = DraftLayout(num_drafts, shift, width)
        self.plan = plan_of(layout)
        inputs = DraftInputs(layout, 64, 4, DEVICE)
        inputs.allocate_kv_groups(1)
        inputs.limits = DraftLimits(MASK, VOCAB, MAX_MODEL_LEN)
        room, most = layout.num_room_tokens, Base.max_model_len
        inputs.tables = DraftBlockTables(block_tables([0] * 8, 4), room, most, [0])
        self.base = Base(inputs)
        drafts = torch.zeros(4, num_drafts, dtype=torch.int64, device=DEVICE)
        self.sampler = DraftSampler(drafts, inputs, self.sample, 4)
        drafter = Counter(layout)
        self.sampler.vocabulary = drafter.vocabulary
        self.runner = DraftRunner(self.base, drafter, inputs, self.sampler)
        for name in ("build_slot_mappings_by_layer", "set_forward_context"):
            monkeypatch.setattr(runner_module, name, lambda *_, **__: nullcontext())

    @staticmethod
    def sample(hidden_states: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        return hidden_states.sum(1).long() % VOCAB


def step_of(
    query_lens: list[int], starts: list[int], rejected: list[int]
) -> TargetStep:
    """A step of requests that have each sampled token 50, 51, …; tokens are 0, 1, …"""
    total, ends = sum(query_lens), np.cumsum([0, *query_lens]).astype(np.int32)
    known = verified_batch(query_lens, starts, 4, input_ids=int32(range(total)))
    batch = SimpleNamespace(
        num_reqs=len(query_lens),
        num_tokens=total,
        num_scheduled_tokens=np.array(query_lens),
        decode_graph_eligible=False,
        num_draft_tokens_per_req=None,
        query_start_loc_np=ends,
        seq_lens_cpu_upper_bound=torch.tensor(starts) + torch.tensor(query_lens),
        **{name: getattr(known, name) for name in OF_BATCH},
    )
    return TargetStep(
        batch,
        num_rejected=int32(rejected),
        slot_mappings=None,
        last_hidden=torch.zeros(total, 1, device=DEVICE),
        aux_hidden=None,
        last_sampled=int64([50, 51, 52, 53]),
        **{name: getattr(known, name) for name in OF_REQUESTS},
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
            for fed in [known] + [MASK] * (width - 1):
                drafts.append((fed + position + len(drafts)) % VOCAB)
        expected.append(drafts[:3])
    assert parts.sampler.drafts[:2].tolist() == expected


@pytest.mark.parametrize("start", [20, MAX_MODEL_LEN - 8])
@pytest.mark.parametrize("shift, width", [(0, 1), (0, 3), (0, 7), (1, 1), (1, 4)])
def test_host_knows_starts_and_bounds_of_lengths(
    monkeypatch, shift: int, width: int, start: int
):
    """Also near max_model_len, where padding slots extend past it."""
    parts = Parts(monkeypatch, width, shift=shift)
    parts.runner.run(step_of([8, 1, 5], [start, 0, 3], [5, 0, 0]), parts.plan, None)
    assert len(parts.base.told) == parts.plan.layout.num_passes
    for (starts, bounds), (known_starts, lengths) in parts.base.told:
        assert starts.tolist() == known_starts.tolist()
        assert (bounds >= lengths).all()
    most = parts.base.draft_max_seq_len
    assert lengths.max() <= most <= parts.runner.inputs.tables.reach()


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
    assert parts.base.rows[0] > real  # padded for the other rank
    assert parts.base.eplb == [real]
