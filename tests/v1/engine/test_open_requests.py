# SPDX-License-Identifier: Apache-2.0
"""Requests that are open when a server is stopped, of all kinds."""

import asyncio
from types import SimpleNamespace

import pytest

from vllm.pooling_params import PoolingParams
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.open_requests import end_open_requests
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector

POOLING = PoolingParams(task="embed")


def engine_request(name: str, **fields) -> EngineCoreRequest:
    nothing = ("mm_features", "lora_request", "cache_salt", "data_parallel_rank")
    nothing += ("sampling_params", "pooling_params")
    usual = dict.fromkeys(nothing) | {"prompt_token_ids": [1, 2], "arrival_time": 0.0}
    return EngineCoreRequest(name, external_req_id=name, **usual | fields)


def add_request(processor: OutputProcessor, name: str, **params):
    queue = RequestOutputCollector(RequestOutputKind.DELTA, name)
    processor.add_request(engine_request(name, **params), "prompt", queue=queue)
    return queue


@pytest.mark.parametrize("is_traced", [False, True])
def test_all_end(is_traced: bool):
    """Regression: the others stayed open behind one for pooling, or if steps are
    traced. A second call finds none."""

    async def run() -> list[bool]:
        processor = OutputProcessor(
            None, log_stats=is_traced, tracing_enabled=is_traced
        )
        sampling = {"sampling_params": SamplingParams(detokenize=False)}
        pooling = [] if is_traced else [{"pooling_params": POOLING}]
        asked = [sampling, *pooling, sampling]
        queues = [
            add_request(processor, str(number), **params)
            for number, params in enumerate(asked)
        ]
        engine = SimpleNamespace(
            output_handler=asyncio.current_task(), output_processor=processor
        )
        await asyncio.to_thread(end_open_requests, engine)
        end_open_requests(engine)
        outputs = [await asyncio.wait_for(queue.get(), 5) for queue in queues]
        assert not processor.request_states
        return [output.finished for output in outputs]

    assert all(asyncio.run(run()))


def test_engine_without_requests():
    end_open_requests(SimpleNamespace())
