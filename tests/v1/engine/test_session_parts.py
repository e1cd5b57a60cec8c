# SPDX-License-Identifier: Apache-2.0
"""Parts of streamed input that a session cannot follow are refused by the front end."""

import pytest

from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.output_processor import OutputProcessor

GRAMMAR = StructuredOutputsParams(regex="[a-z]+")
LATER_ONLY = {"logprobs": 2, "logprob_token_ids": [3], "prompt_logprobs": 0}


def add_parts(*parts: dict, resumable: bool = True) -> None:
    """Adds parts with these sampling parameters to a session."""
    processor = OutputProcessor(tokenizer=None, log_stats=False)
    for given in parts:
        params = SamplingParams(output_kind=RequestOutputKind.DELTA, **given)
        request = EngineCoreRequest(
            request_id="a",
            external_req_id="a",
            prompt_token_ids=[1],
            mm_features=None,
            sampling_params=params,
            pooling_params=None,
            arrival_time=0.0,
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
            resumable=resumable,
        )
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
