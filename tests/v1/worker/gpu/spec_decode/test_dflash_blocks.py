# SPDX-License-Identifier: Apache-2.0
"""Blocks of the DFlash family that are shorter than those of the checkpoint."""

from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import nn

from vllm.model_executor.models.qwen3_dflash2 import DFlashGroupedConv
from vllm.v1.worker.gpu.dp_utils import DPSyncState
from vllm.v1.worker.gpu.spec_decode.dflash2.speculator import DFlash2Speculator
from vllm.v1.worker.gpu.spec_decode.unified.drafters.dflash import WHOLE, TreeDFlash2

K, SHORT, REQUESTS = 7, 3, 4


class Head(nn.Module):
    """A DFlash2 head: a convolution, and a scorer that vLLM compiles, or not."""

    def __init__(self, is_compiled: bool):
        super().__init__()
        self.model, self.model.candidate_selector = nn.Module(), nn.Module()
        self.model.do_not_compile = False
        if is_compiled:  # the one of a beam has no such attribute
            self.model.candidate_selector.do_not_compile = False
        self.model.conv = Mock(spec=DFlashGroupedConv, block_size=K + 1)

    def modules(self):
        return iter([self.model.conv])


class Speculator(TreeDFlash2):
    """What `propose` reads of an engine's speculator."""

    def __init__(self):
        lengths = {WHOLE: K, SHORT: SHORT, K: K}
        self._of_block = {
            block: {"num_speculative_steps": k, "num_query_per_req": k + 1}
            for block, k in lengths.items()
        }
        self.tree_step, self.block_tables = None, None
        self._start_loc = torch.zeros(REQUESTS + 1, dtype=torch.int32)
        self.drafts = torch.zeros(REQUESTS, K, dtype=torch.int64)


@pytest.fixture
def speculator(monkeypatch, request) -> Speculator:
    head = Head(getattr(request, "param", True))
    monkeypatch.setattr(DFlash2Speculator, "load_draft_model", lambda *_: head)
    made = Speculator()
    made.model = made.load_draft_model(None, None)
    return made


@pytest.mark.parametrize("speculator", [True, False], indirect=True)
def test_what_was_compiled_for_whole_blocks_runs_as_it_is(speculator: Speculator):
    """Regression: convolutions of short blocks reached into other requests' rows, and a
    beam's scorer, which is not compiled, raised."""
    inner = speculator.model.model
    for block, k in ((SHORT, SHORT), (K, K), (SHORT, SHORT), (WHOLE, K)):
        speculator._use_block(block)
        assert inner.conv.block_size == k + 1
        assert inner.do_not_compile == (k < K)
        scorer = vars(inner.candidate_selector)
        assert scorer.get("do_not_compile", k < K) == (k < K)


def test_idle_rank_drafts_for_fewer_requests(speculator: Speculator, monkeypatch):
    """Regression: chains of the agreed requests were written to rows of the padded."""
    agreed = REQUESTS - 1
    chains = torch.arange(agreed * SHORT).view(agreed, SHORT)
    monkeypatch.setattr(DFlash2Speculator, "propose", lambda *_, **__: chains)
    starts = torch.arange(REQUESTS + 1, dtype=torch.int32)
    batch = SimpleNamespace(num_reqs=REQUESTS, query_start_loc=starts)
    batch.idx_mapping, batch.query_start_loc_np = starts[:-1], np.array(starts)
    found = speculator.propose(
        batch, {}, {}, None, None, None, None, dummy_run=True,
        skip_attn_for_dummy_run=True, num_speculative_tokens=SHORT,
        dp_sync_state=Mock(spec=DPSyncState, num_reqs=agreed),
    )  # fmt: skip
    assert torch.equal(found[:agreed, :SHORT], chains)
