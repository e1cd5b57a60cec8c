# SPDX-License-Identifier: Apache-2.0
"""What a drafter does not see of a request is logged."""

from types import SimpleNamespace

import pytest

from vllm import PoolingParams, SamplingParams
from vllm.config.drafter import DrafterConfig
from vllm.v1.spec_decode import unseen
from vllm.v1.spec_decode.opt_out import KEY

PLAIN, REFUSING = SamplingParams(), SamplingParams(extra_args={KEY: True})
LORA = object()


@pytest.mark.parametrize(
    "drafter, kind, params, lora, words",
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
def test_what_is_unseen(monkeypatch, drafter, kind, params, lora, words: list[str]):
    logged = []
    monkeypatch.setattr(
        unseen.logger, "warning_once", lambda *args: logged.append(args)
    )
    spec = None
    if drafter is not None:
        drafter = DrafterConfig(
            **{"method": "draft_model"} | drafter, num_speculative_tokens=3
        )
        spec = SimpleNamespace(method=drafter.method, drafter=drafter)
    unseen.say_what_is_unseen(spec, kind, params, lora)
    assert len(logged) == len(words)
    for word, (line, *args) in zip(words, logged, strict=True):
        assert word in line % tuple(args)
