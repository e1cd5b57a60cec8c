# SPDX-License-Identifier: Apache-2.0
"""The front end refuses what workers have no room for, and a session cannot follow."""

from types import SimpleNamespace

import pytest
import torch

from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.engine.parallel_sampling import ParentRequest
from vllm.v1.engine.request_limits import check_sampling_limits
from vllm.v1.worker.gpu.sample.bad_words import BadWordsState
from vllm.v1.worker.gpu.sample.logit_bias import LogitBiasState
from vllm.v1.worker.gpu.sample.states import SamplingStates
from vllm.v1.worker.gpu.states import RequestState

from .test_open_requests import engine_request

LONGEST = 64


def config(is_v2: bool = True) -> SimpleNamespace:
    return SimpleNamespace(
        use_v2_model_runner=is_v2, model_config=SimpleNamespace(max_model_len=LONGEST)
    )


def with_stops(number: int) -> SamplingParams:
    return SamplingParams(min_tokens=1, stop_token_ids=list(range(number)))


def with_bad_words(number: int) -> SamplingParams:
    params = SamplingParams()
    words = [[1] * 64 for _ in range(number // 64)]
    params._bad_words_token_ids = [*words, [1] * (number % 64)]
    return params


# By parameter: makes a request of a given size, and the largest allowed size.
SIZES = {
    "logit_bias": (
        lambda size: SamplingParams(logit_bias=dict.fromkeys(range(size), 1.0)),
        1024,
    ),
    "allowed_token_ids": (
        lambda size: SamplingParams(allowed_token_ids=list(range(size))),
        1024,
    ),
    "stop_token_ids": (with_stops, 128),
    "bad_words": (with_bad_words, 1024),
    "seed": (lambda size: SamplingParams(seed=size), 2**63 - 1),
    "seed of three": (lambda size: SamplingParams(seed=size, n=3), 2**63 - 3),
    "negative seed": (lambda size: SamplingParams(seed=-size - 1), 2**63 - 1),
    "max_tokens": (lambda size: SamplingParams(max_tokens=size), 2**31 - 1 - LONGEST),
}


@pytest.mark.parametrize("name", SIZES)
def test_one_above_limit_is_refused(name: str):
    make, most = SIZES[name]
    check_sampling_limits(make(most), config())
    with pytest.raises(VLLMValidationError, match=rf"must be at most {most}, got"):
        check_sampling_limits(make(most + 1), config())
    check_sampling_limits(make(most + 1), config(is_v2=False))


class Worker:
    """All states of a worker that a request's sampling parameters are written to."""

    def __init__(self) -> None:
        cpu = torch.device("cpu")
        self.requests = RequestState(
            max_num_reqs=1,
            max_model_len=LONGEST,
            max_num_batched_tokens=LONGEST,
            num_speculative_steps=1,
            vocab_size=2048,
            device=cpu,
        )
        self.states = [
            SamplingStates(1, 2048),
            LogitBiasState(None, self.requests),
            BadWordsState(None, self.requests),
        ]

    def add(self, params: SamplingParams) -> None:
        prompt = [0] * LONGEST
        self.requests.add_request("a", LONGEST, prompt, 0, params.max_tokens)
        for state in self.states:
            state.add_request(0, params)


@pytest.mark.parametrize("name", SIZES)
def test_limits_match_worker_states(name: str):
    make, most = SIZES[name]
    add_outputs(make(most))
    with pytest.raises((ValueError, OverflowError)):
        add_outputs(make(most + 1))


def add_outputs(params: SamplingParams) -> None:
    """Adds each of a request's outputs (`n`) to a worker."""
    request = SimpleNamespace(request_id="a", external_req_id="a", params=params)
    parent = ParentRequest(request)
    for index in range(params.n):
        Worker().add(parent.get_child_info(index)[1])


# Parts of streamed input.

GRAMMAR = StructuredOutputsParams(regex="[a-z]+")
LATER_ONLY = {"logprobs": 2, "logprob_token_ids": [3], "prompt_logprobs": 0}


def add_parts(*parts: dict, resumable: bool = True) -> None:
    """Adds parts with these sampling parameters to a session."""
    processor = OutputProcessor(tokenizer=None, log_stats=False)
    for given in parts:
        params = SamplingParams(output_kind=RequestOutputKind.DELTA, **given)
        request = engine_request("a", sampling_params=params, resumable=resumable)
        processor.add_request(request, None)


@pytest.mark.parametrize("name", LATER_ONLY)
def test_logprobs_of_later_parts_only_are_refused(name: str):
    asks = {name: LATER_ONLY[name]}
    add_parts(asks, {}, asks)
    with pytest.raises(VLLMValidationError, match="only if the first part"):
        add_parts({}, asks)


def test_grammars_of_sessions_are_refused():
    add_parts({"structured_outputs": GRAMMAR}, resumable=False)
    for before in ([], [{}]):
        with pytest.raises(VLLMValidationError, match="structured_outputs"):
            add_parts(*before, {"structured_outputs": GRAMMAR})
