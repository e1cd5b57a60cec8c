# SPDX-License-Identifier: Apache-2.0
"""Requests that turn drafting off, and those of which a drafter does not see all."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from vllm import PoolingParams, SamplingParams
from vllm.config.drafter import DrafterConfig
from vllm.exceptions import VLLMValidationError
from vllm.v1.spec_decode import opt_out
from vllm.v1.spec_decode.opt_out import (
    KEY,
    check_opt_out,
    refuses_drafts,
    warn_of_unseen,
)
from vllm.v1.worker.gpu.spec_decode.verification import without_opted_out


def params(value) -> SamplingParams:
    return SamplingParams(extra_args={KEY: value})


def config(is_unified: bool = True) -> SimpleNamespace:
    return SimpleNamespace(drafter=DrafterConfig("eagle3", 3, is_unified=is_unified))


@pytest.mark.parametrize("value, off", [(True, True), (1, True), (0, False)])
def test_valid_values(value, off: bool):
    """The server parses true and false as 1 and 0."""
    check_opt_out(params(value), config())
    assert refuses_drafts(params(value)) is off
    assert not refuses_drafts(SamplingParams()) and not refuses_drafts(None)


@pytest.mark.parametrize("value", ["true", 2, [1]])
def test_invalid_values_are_client_errors(value):
    with pytest.raises(VLLMValidationError, match=f"{KEY} must be true or false"):
        params(value)._validate_spec_decode(config())


@pytest.mark.parametrize("key", [7, "disable_spec_decoding", "a\nline", None])
def test_other_arguments_are_left_alone(key, caplog_vllm):
    """Regression: keys that are no text failed, and clients' text filled the log."""
    given = SamplingParams(extra_args={key: True})
    check_opt_out(given, config())
    assert not refuses_drafts(given) and not caplog_vllm.text


def test_engines_without_the_unified_speculator():
    """Regression: an engine without drafts failed on every request."""
    with pytest.raises(VLLMValidationError, match="not supported with Model Runner V1"):
        check_opt_out(params(True), config(is_unified=False))
    for given in (SamplingParams(), params(False)):
        check_opt_out(given, config(is_unified=False))
    for given in (SamplingParams(), params(True), params(False)):
        given._validate_spec_decode(None)


def test_only_drafts_of_refusing_requests_are_replaced():
    """Requests of states 2, 0 and 3 have 3, 1 and 3 rows; the first refuses drafts."""
    refuses = np.array([False, True, True, False])
    batch = SimpleNamespace(
        idx_mapping_np=np.array([2, 0, 3]),
        expanded_idx_mapping=torch.tensor([2, 2, 2, 0, 3, 3, 3]),
        expanded_local_pos=torch.tensor([0, 1, 2, 0, 0, 1, 2], dtype=torch.int32),
    )
    sampler, drafts = SimpleNamespace(refuses_drafts=refuses), torch.arange(10, 17)
    found = without_opted_out(sampler, drafts, batch)
    assert found.tolist() == [10, -1, -1, 13, 14, 15, 16]
    # Unchanged: sampling parameters are applied by the original drafts.
    assert drafts.tolist() == [*range(10, 17)]
    refuses[2] = False
    assert without_opted_out(sampler, drafts, batch) is drafts


PLAIN, REFUSING = SamplingParams(), params(True)
LORA = object()


@pytest.mark.parametrize(
    "drafter, kind, asked, lora, words",
    [
        ({}, "token", PLAIN, None, []),
        ({}, "embeds", PLAIN, None, ["prompt embeddings"]),
        ({}, "multimodal", PLAIN, None, ["images"]),
        ({}, "embeds", PLAIN, LORA, ["prompt embeddings", "LoRA"]),
        ({"method": "eagle3"}, "embeds", PLAIN, None, []),
        ({"method": "eagle3"}, "token", PLAIN, LORA, ["LoRA"]),
        ({"target_features": object()}, "embeds", PLAIN, None, []),
        ({}, "embeds", REFUSING, LORA, []),
        ({}, "embeds", PoolingParams(), None, []),
        ({"method": "ngram"}, "embeds", PLAIN, LORA, []),
        (None, "embeds", PLAIN, LORA, []),
    ],
)
def test_what_is_unseen(monkeypatch, drafter, kind, asked, lora, words: list[str]):
    logged = []
    monkeypatch.setattr(
        opt_out.logger, "warning_once", lambda *args: logged.append(args)
    )
    spec = None
    if drafter is not None:
        usual = {"method": "draft_model", "num_speculative_tokens": 3}
        drafter = DrafterConfig(**usual | drafter)
        spec = SimpleNamespace(method=drafter.method, drafter=drafter)
    warn_of_unseen(spec, kind, asked, lora)
    assert len(logged) == len(words)
    for word, (line, *args) in zip(words, logged, strict=True):
        assert word in line % tuple(args)
