# SPDX-License-Identifier: Apache-2.0
"""From a verified step to a drafter's inputs: our launch, and the base's chains.

Each function returns a call that does the whole preparation of a pass once. The base's
own functions run on stand-ins that hold only the tensors that they touch. What is left
out is the same for all: the projection of the target's hidden states, and the attention
metadata that is made of the result.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.spec_decode.decode_step import (
    BLOCK_SIZE,
    MASK_TOKEN,
    MAX_MODEL_LEN,
    DecodeStep,
)
from benchmarks.spec_decode.plan import runs_mode
from benchmarks.spec_decode.shapes import PARALLEL
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer
from vllm.v1.worker.gpu.input_batch import InputBuffers
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator
from vllm.v1.worker.gpu.spec_decode.standalone_ar import speculator as standalone
from vllm.v1.worker.gpu.spec_decode.target_dependent_ar import speculator as dependent
from vllm.v1.worker.gpu.spec_decode.unified.buffers import DraftBuffers
from vllm.v1.worker.gpu.spec_decode.unified.inputs import (
    HiddenRows,
    PreviousPass,
    VerifiedBatch,
    prepare_inputs,
)
from vllm.v1.worker.gpu.spec_decode.unified.layout import DraftLayout

EAGLE = ("eagle3", "peagle")
# States of a token that a drafter is fed: three layers', or those that PARD-2 projects.
NUM_SOURCES = {"pard2": 1, "eagle3": 3, "peagle": 3}
Chain = Callable[[], Any]


def layout_of(mode: str, num_drafts: int) -> DraftLayout:
    width = num_drafts if mode in PARALLEL else 1
    return DraftLayout(num_drafts, int(mode in EAGLE), width)


class Ours:
    """One launch of our kernel per pass."""

    def __init__(self, step: DecodeStep, mode: str, num_drafts: int):
        self.step, self.layout = step, layout_of(mode, num_drafts)
        self.sources = tuple(step.aux[: NUM_SOURCES.get(mode, 0)])
        self.hidden_size = step.combined.shape[1] if self.sources else None
        self.device, dtype = step.positions.device, step.combined.dtype
        self.buffers = DraftBuffers(
            self.layout,
            step.num_tokens,
            step.max_num_reqs,
            self.device,
            self.hidden_size,
            dtype,
        )
        self.buffers.allocate_kv_groups(step.tables.num_kv_cache_groups)
        self.mask = step.combined.new_zeros(3 * step.combined.shape[1])
        # What PARD-2 keeps of KV blocks.
        self.kept = step.combined.new_zeros(1 + step.num_blocks, step.combined.shape[1])
        self.draft_tokens = torch.zeros(
            step.num_reqs, num_drafts, dtype=torch.int64, device=self.device
        )

    def first(self) -> Chain:
        step = self.step
        values = {name: getattr(step, name) for name in VerifiedBatch._fields}
        stand_ins = self.mask if self.layout.token_shift else self.kept
        hidden = HiddenRows(self.sources, stand_ins) if self.sources else None
        rows = step.num_tokens + step.num_reqs * self.layout.num_extra_slots
        return self._call(VerifiedBatch(**values), hidden, rows)

    def later(self) -> Chain:
        self.first()()  # a later pass goes on from the buffers of the first
        hidden = None
        if self.buffers.feedback is not None:
            rows = self.buffers.feedback[: self.step.num_reqs]
            hidden = HiddenRows((rows,), self.mask[: self.hidden_size])
        return self._call(
            PreviousPass(self.draft_tokens, 1), hidden, self.step.num_reqs
        )

    def _call(self, source, hidden: HiddenRows | None, num_rows: int) -> Chain:
        return lambda: prepare_inputs(
            source,
            self.layout,
            self.buffers,
            self.step.tables,
            num_samples=self.layout.parallel_width,
            num_padded_tokens=num_rows,
            limit=MAX_MODEL_LEN,
            mask_token_id=MASK_TOKEN,
            hidden=hidden,
        )


class BaseV1:
    """Runner V1: what its drafter does before it builds attention metadata."""

    def __init__(self, step: DecodeStep, mode: str, num_drafts: int):
        self.step, self.is_eagle = step, mode in EAGLE
        extra = num_drafts if mode in PARALLEL else 1
        device = step.positions.device
        rows = step.num_tokens + step.max_num_reqs * extra
        drafter = object.__new__(SpecDecodeBaseProposer)
        drafter.__dict__ |= {
            "use_heterogeneous_vocab": False,
            "uses_mrope": False,
            "vllm_config": SimpleNamespace(
                model_config=SimpleNamespace(uses_mrope=False)
            ),
            "device": device,
            "block_size": BLOCK_SIZE,
            "max_model_len": MAX_MODEL_LEN,
            "needs_extra_input_slots": mode != "eagle3",
            "extra_slots_per_request": extra,
            "net_num_new_slots_per_request": extra - self.is_eagle,
            "pass_hidden_states_to_model": self.is_eagle,
            "parallel_drafting_token_id": MASK_TOKEN,
            "parallel_drafting_hidden_state_tensor": step.combined[0].clone(),
            "input_ids": torch.zeros(rows, dtype=torch.int32, device=device),
            "positions": torch.zeros(rows, dtype=torch.int64, device=device),
            "hidden_states": step.combined.new_zeros(rows, step.combined.shape[1]),
            "is_rejected_token_mask": torch.zeros(rows, dtype=torch.bool).to(device),
            "is_masked_token_mask": torch.zeros(rows, dtype=torch.bool).to(device),
            "arange": torch.arange(rows, dtype=torch.int32, device=device),
        }
        self.drafter = drafter

    def first(self) -> Chain:
        step, drafter = self.step, self.drafter
        metadata = _metadata_v1(step)
        drafts = (step.query_start_loc[1:] - step.query_start_loc[:-1] - 1).cumsum(0)
        counts = SimpleNamespace(cu_num_draft_tokens=drafts.int())
        next_tokens = step.last_sampled[step.idx_mapping, 0].int()

        def call() -> None:
            if self.is_eagle:
                torch.cat(step.aux, dim=-1)
            found = drafter.prepare_inputs_padded(metadata, counts, step.num_sampled)
            padded, last_indices, num_rejected = found
            drafter.set_inputs_first_pass(
                target_token_ids=step.input_ids,
                next_token_ids=next_tokens,
                target_positions=step.positions,
                target_hidden_states=step.combined,
                token_indices_to_sample=last_indices,
                cad=padded,
                num_rejected_tokens_gpu=num_rejected,
            )

        return call


def _metadata_v1(step: DecodeStep) -> CommonAttentionMetadata:
    return CommonAttentionMetadata(
        query_start_loc=step.query_start_loc,
        query_start_loc_cpu=torch.from_numpy(step.query_start_loc_np),
        seq_lens=step.seq_lens,
        num_reqs=step.num_reqs,
        num_actual_tokens=step.num_tokens,
        max_query_len=step.query_len,
        max_seq_len=MAX_MODEL_LEN,
        block_table_tensor=step.tables.input_block_tables[0][: step.num_reqs],
        slot_mapping=step.tables.slot_mappings[0, : step.num_tokens],
    )


class BaseV2:
    """Runner V2: draft models ("standalone_ar") and EAGLE-3, autoregressive."""

    def __init__(self, step: DecodeStep, mode: str, num_drafts: int):
        self.step, self.mode, self.num_drafts = step, mode, num_drafts
        device, n = step.positions.device, step.max_num_reqs
        rows = step.num_tokens + n
        self.buffers = InputBuffers(n, rows, device)
        self.hidden_states = step.combined.new_zeros(rows, step.combined.shape[1])
        self.requests = SimpleNamespace(
            temperature=torch.zeros_like(step.temperature),
            seeds=torch.zeros_like(step.seeds),
            idx_mapping=torch.zeros(n, dtype=step.idx_mapping.dtype, device=device),
        )
        self.last_indices = torch.zeros(n, dtype=torch.int64, device=device)
        self.draft_step = torch.tensor(0, dtype=torch.int64, device=device)
        self.sample_positions = torch.zeros(n, dtype=torch.int64, device=device)
        self.drafts = torch.zeros(n, num_drafts, dtype=torch.int64, device=device)
        self.ids = torch.zeros(rows, dtype=torch.int32, device=device)
        self.positions = torch.zeros(rows, dtype=torch.int64, device=device)
        self.slots = torch.zeros(1, rows, dtype=torch.int64, device=device)

    def first(self) -> Chain:
        is_draft = self.mode == "draft"
        prepare = self._first_of_draft_model if is_draft else self._first_of_eagle

        def call() -> None:
            step = self.step
            DraftModelSpeculator._copy_request_inputs(
                self.requests,
                step.num_reqs,
                step.idx_mapping,
                step.temperature,
                step.seeds,
            )
            prepare()

        return call

    def _first_of_draft_model(self) -> None:
        step, n = self.step, self.step.num_reqs
        rows = standalone.prepare_prefill_inputs(
            self.buffers,
            step,
            step.last_sampled,
            step.num_rejected,
            self.ids,
            self.positions,
            self.last_indices,
            step.max_num_reqs,
            MAX_MODEL_LEN,
        )
        step.tables.compute_slot_mappings(
            step.idx_mapping,
            self.buffers.query_start_loc[: n + 1],
            self.positions[:rows],
            rows,
            out=self.slots,
        )
        self.positions[self.last_indices[:n]]

    def _first_of_eagle(self) -> None:
        step = self.step
        torch.cat(step.aux, dim=-1)
        dependent.prepare_prefill_inputs(
            self.last_indices,
            self.draft_step,
            self.buffers,
            step,
            step.num_sampled,
            step.num_rejected,
            step.last_sampled,
            step.next_prefill_tokens,
            step.max_num_reqs,
        )
        self.hidden_states[: step.num_tokens].copy_(step.combined)

    def later(self) -> Chain:
        self.first()()
        n = self.step.num_reqs
        self.buffers.query_start_loc[: n + 1] = torch.arange(n + 1)
        is_draft = self.mode == "draft"
        advance = self._later_of_draft_model if is_draft else self._later_of_eagle

        def call() -> None:
            advance()
            self.step.tables.compute_slot_mappings(
                self.step.idx_mapping,
                self.buffers.query_start_loc[: n + 1],
                self.buffers.positions[:n],
                n,
            )
            self.draft_step.fill_(1)

        return call

    def _later_of_draft_model(self) -> None:
        buffers, n = self.buffers, self.step.num_reqs
        positions, lengths = buffers.positions[:n], buffers.seq_lens[:n]
        buffers.input_ids[:n].copy_(self.drafts[:n, 0].int())
        torch.clamp(positions + 1, max=MAX_MODEL_LEN - 1, out=positions)
        torch.clamp(lengths + 1, max=MAX_MODEL_LEN, out=lengths)

    def _later_of_eagle(self) -> None:
        n = self.step.num_reqs
        dependent.update_draft_inputs(
            self.drafts[:n, 0],
            self.draft_step,
            self.hidden_states[:n],
            self.drafts,
            self.hidden_states,
            self.buffers,
            self.sample_positions,
            n,
            MAX_MODEL_LEN,
            self.num_drafts,
        )


CHAINS = {"ours": Ours, "base-v1": BaseV1, "base-v2": BaseV2}


def make_chain(
    name: str, mode: str, which: str, step: DecodeStep, num_drafts: int
) -> Chain | None:
    """The preparation of a pass, "first" or "later"; None where there is none."""
    if not runs_mode(name, mode):
        return None
    if which == "later" and (mode in PARALLEL or name == "base-v1"):
        return None
    return getattr(CHAINS[name](step, mode, num_drafts), which)()
