# SPDX-License-Identifier: Apache-2.0
"""One request turns drafting off: what it may say, and what becomes of its drafts."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from vllm import SamplingParams
from vllm.config.drafter import DrafterConfig
from vllm.exceptions import VLLMValidationError
from vllm.platforms import current_platform
from vllm.v1.spec_decode import opt_out
from vllm.v1.spec_decode.opt_out import KEY, check_opt_out, refuses_drafts

if current_platform.is_cpu():
    import vllm.v1.worker.cpu.shm  # noqa: F401  (what Runner V2 needs on a CPU)

from vllm.v1.worker.gpu.spec_decode.unwanted import without_unwanted


def params(value) -> SamplingParams:
    return SamplingParams(extra_args={KEY: value})


def config(is_unified: bool = True) -> SimpleNamespace:
    return SimpleNamespace(drafter=DrafterConfig("eagle3", 3, is_unified=is_unified))


@pytest.mark.parametrize("value, off", [(True, True), (1, True), (0, False)])
def test_true_and_false(value, off: bool):
    """A server reads them as 1 and 0."""
    check_opt_out(params(value), config())
    assert refuses_drafts(params(value)) is off


@pytest.mark.parametrize("value", ["true", 2, [1]])
def test_anything_else_is_an_error_of_the_clients(value):
    with pytest.raises(VLLMValidationError, match=f"{KEY} must be true or false"):
        check_opt_out(params(value), config())
    with pytest.raises(VLLMValidationError):
        params(value)._validate_spec_decode(config())


def test_no_other_speculator_goes_by_it():
    with pytest.raises(VLLMValidationError, match="not supported with Model Runner V1"):
        check_opt_out(params(True), config(is_unified=False))
    check_opt_out(params(False), config(is_unified=False))
    check_opt_out(SamplingParams(), config(is_unified=False))
    assert not refuses_drafts(SamplingParams()) and not refuses_drafts(None)


@pytest.mark.parametrize(
    "given, is_told",
    [
        ({"disable_specdecode": True}, True),
        ({"disable_speculative_decode": True}, True),
        ({KEY: False, "disable_specdecode": True}, False),
        ({"session_id": "a", "ngram_size": 3}, False),
    ],
)
def test_what_is_spelt_nearly_so_is_told(monkeypatch, given: dict, is_told: bool):
    """And passed on, as all that may be for a plugin."""
    told = []
    monkeypatch.setattr(opt_out.logger, "warning_once", lambda *said: told.append(said))
    asked = SamplingParams(extra_args=dict(given))
    check_opt_out(asked, config())
    check_opt_out(asked, None)  # nothing to turn off
    assert len(told) == is_told and asked.extra_args == given


def test_without_drafts_there_are_none_to_turn_off():
    """Defect: an engine without drafts failed on every request."""
    for given in (SamplingParams(), params(True), params(False)):
        given._validate_spec_decode(None)


def test_only_its_own_drafts_are_never_accepted():
    """Requests of states 2, 0 and 3, with 3, 1 and 3 rows; the first wants none."""
    refuses = np.array([False, True, True, False])
    batch = SimpleNamespace(
        idx_mapping_np=np.array([2, 0, 3]),
        expanded_idx_mapping=torch.tensor([2, 2, 2, 0, 3, 3, 3]),
        expanded_local_pos=torch.tensor([0, 1, 2, 0, 0, 1, 2], dtype=torch.int32),
    )
    sampler, drafts = SimpleNamespace(refuses_drafts=refuses), torch.arange(10, 17)
    found = without_unwanted(sampler, drafts, batch)
    assert found.tolist() == [10, -1, -1, 13, 14, 15, 16]
    assert drafts.tolist() == [*range(10, 17)]  # sampling parameters go by them
    refuses[2] = False
    assert without_unwanted(sampler, drafts, batch) is drafts
