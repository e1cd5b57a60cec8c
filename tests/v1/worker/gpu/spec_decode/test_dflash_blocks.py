# SPDX-License-Identifier: Apache-2.0
"""Blocks of the DFlash family that are shorter than those of the checkpoint."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, Mock

import numpy as np
import pytest
import torch

from vllm.model_executor.models.qwen3_dflash2 import (
    DFlashGroupedConv,
    _grouped_conv,
    dflash2_grouped_conv_impl,
)
from vllm.v1.worker.gpu.dp_utils import DPSyncState
from vllm.v1.worker.gpu.spec_decode.dflash import speculator as dflash
from vllm.v1.worker.gpu.spec_decode.dflash2.speculator import DFlash2Speculator
from vllm.v1.worker.gpu.spec_decode.unified.drafters.dflash import WHOLE, TreeDFlash2

K, SHORT, REQUESTS = 7, 3, 4


class Speculator(TreeDFlash2):
    """What `propose` reads of an engine's speculator, with a head whose scorer vLLM
    compiles, or, as a beam's, does not."""

    tree_step = block_tables = None

    def __init__(self, monkeypatch, is_compiled: bool = True, device: str = "cpu"):
        self.device = torch.device(device)
        lengths = {WHOLE: K, SHORT: SHORT, K: K}
        self._of_block = {
            block: {"num_speculative_steps": k, "num_query_per_req": k + 1}
            for block, k in lengths.items()
        }
        self._start_loc = torch.zeros(REQUESTS + 1, dtype=torch.int32)
        self.drafts = torch.zeros(REQUESTS, K, dtype=torch.int64)
        self.conv, compiled = Mock(spec=DFlashGroupedConv), {"do_not_compile": False}
        self.scorer_module = SimpleNamespace(**compiled if is_compiled else {})
        self.inner = SimpleNamespace(candidate_selector=self.scorer_module, **compiled)
        head = SimpleNamespace(model=self.inner, modules=lambda: [self.conv])
        monkeypatch.setattr(DFlash2Speculator, "load_draft_model", lambda *_: head)
        self.load_draft_model(None, None)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("is_compiled", [True, False])
def test_what_was_compiled_for_whole_blocks(monkeypatch, is_compiled, device):
    """Regression: convolutions of short blocks reached into other requests' rows, and a
    beam's scorer, which is not compiled, raised."""
    made = Speculator(monkeypatch, is_compiled, device)
    for block, k in ((SHORT, SHORT), (K, K), (SHORT, SHORT), (WHOLE, K)):
        made._use_block(block)
        assert made.conv.block_size == k + 1
        assert DFlashGroupedConv.shorter_block == (k + 1 if k < K else None)
        assert made.inner.do_not_compile == (k < K and device == "cpu")
        assert vars(made.scorer_module) == {"do_not_compile": k < K} or not is_compiled


def test_kernel_of_convolutions_is_told_the_block(on_cpu: bool, monkeypatch):
    """Regression: the kernel has its length from what is compiled for whole blocks."""
    rows, groups, taps = REQUESTS * (SHORT + 1), 4, 3
    x, base = torch.randn(rows, 64), torch.randn(taps, 64)
    delta = torch.randn(rows, taps, groups)
    monkeypatch.setattr(DFlashGroupedConv, "shorter_block", SHORT + 1)
    given = (t.to("cpu" if on_cpu else "cuda") for t in (x, delta, base))
    found = dflash2_grouped_conv_impl(*given, K + 1, 64 // groups)
    wanted = _grouped_conv(x, delta, base, SHORT + 1, groups, 64 // groups, taps)
    torch.testing.assert_close(found.cpu(), wanted)


def test_inputs_are_prepared_by_one_kernel(monkeypatch):
    """Regression: prompts of other lengths compiled it again, while serving."""
    kernel, most = MagicMock(), 512
    monkeypatch.setattr(dflash, "_prepare_dflash_inputs_kernel", kernel)
    others, rest = [Mock() for _ in range(9)], [Mock() for _ in range(7)]
    rest += [16, 0, 1, 1, 0, K + 1, K, 1, most, most]
    for length in (1, 40, 400):
        batch = Mock(num_reqs=1, num_scheduled_tokens=np.array([length]))
        dflash.prepare_dflash_inputs(*others, batch, *rest)
    launches = kernel.__getitem__.return_value.call_args_list
    assert len({str(launch.kwargs) for launch in launches}) == 1 < len(launches)


def propose(monkeypatch, drafts: Mock, **others: Any) -> torch.Tensor:
    """What is drafted in a short block, if vLLM's speculator does as `drafts`."""
    monkeypatch.setattr(DFlash2Speculator, "propose", drafts)
    starts = torch.arange(REQUESTS + 1, dtype=torch.int32)
    batch = SimpleNamespace(num_reqs=REQUESTS, query_start_loc=starts)
    batch.idx_mapping, batch.query_start_loc_np = starts[:-1], starts.numpy()
    others |= {"dummy_run": True, "skip_attn_for_dummy_run": True}
    return Speculator(monkeypatch).propose(
        batch, {}, {}, *[None] * 4, num_speculative_tokens=SHORT, **others
    )


def test_idle_rank_drafts_for_fewer_requests(monkeypatch):
    """Regression: chains of the agreed requests were written to rows of the padded."""
    agreed = REQUESTS - 1
    chains = torch.arange(agreed * SHORT).view(agreed, SHORT)
    state = Mock(spec=DPSyncState, num_reqs=agreed)
    found = propose(monkeypatch, Mock(return_value=chains), dp_sync_state=state)
    assert torch.equal(found[:agreed, :SHORT], chains)


def test_block_is_whole_after_an_error(monkeypatch):
    """Else other engines of the process would run short blocks."""
    with pytest.raises(RuntimeError):
        propose(monkeypatch, Mock(side_effect=RuntimeError))
    assert DFlashGroupedConv.shorter_block is None
