# SPDX-License-Identifier: Apache-2.0
"""`vllm serve` with a drafter and many clients: is every answer the target's own?

Clients request random lengths, streamed and not, with stop tokens, penalties and
seeds, and some disconnect early. The KV cache is so small that requests are preempted
all the time. Traffic comes in rounds; every other round ends with all clients
disconnecting at once. After each round the server must be idle with every KV cache
block free, and its memory is recorded.

`VLLM_TEST_SOAK_SECONDS` is the duration of the traffic for each drafter.
"""

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from .clients import LONGEST_OUTPUT, LONGEST_PROMPT, Answer, Asks, Traffic
from .server import Server

SECONDS = float(os.environ.get("VLLM_TEST_SOAK_SECONDS", 30))
ROUNDS, CLIENTS, LEAVING = 4, 64, 0.5
# The KV cache holds only some of the running requests.
PRESSED = [
    f"--max-model-len={LONGEST_PROMPT + LONGEST_OUTPUT}",
    "--max-num-seqs=8",
    "--block-size=32",
    "--num-gpu-blocks-override=13",
    "--enable-prefix-caching",
]
# Logprobs closer than this are ties: products of another shape round differently.
TIE = 1e-3
# In the second half of the rounds: new workers grow by up to 70 MiB, and then stop.
MAX_GROWTH = 128 << 20
DRAFTERS = {
    "pard": {"method": "draft_model", "num_speculative_tokens": 7},
    "peagle": {"method": "eagle3", "num_speculative_tokens": 7},
    "pard-tree": {
        "method": "draft_model",
        "num_speculative_tokens": 5,
        "draft_tree": 15,
    },
}


def soak(server: Server, traffic: Traffic) -> list[dict[str, Any]]:
    """Runs all rounds; returns what the server still holds after each."""
    moments = []
    for number in range(ROUNDS):
        all_leave = number % 2 == 1
        asyncio.run(traffic.round(CLIENTS, SECONDS / ROUNDS, all_leave))
        idle = server.wait_until_idle()
        memory = {"rss": server.resident_bytes(), "gpu": server.gpu_bytes()}
        moments.append(idle | memory)
    return moments


@pytest.mark.slow
@pytest.mark.parametrize("name", DRAFTERS)
def test_soak(serve, models: Path, answers: list[Answer], name: str):
    """No wrong tokens, leaked KV cache blocks, stuck requests or growing memory."""
    spec = DRAFTERS[name] | {"model": str(models / name.partition("-")[0])}
    tokenizer = AutoTokenizer.from_pretrained(models / "target")
    asks = Asks(answers, tokenizer, LEAVING)
    with serve(*PRESSED, f"--speculative-config={json.dumps(spec)}") as server:
        traffic = Traffic(server.url, asks, TIE)
        moments, found = soak(server, traffic), server.metrics()
    assert traffic.complaints == []
    assert not any(m["stuck_requests"] or m["leaked_blocks"] for m in moments)
    # Tokens after a tie cannot be compared: there must be few of them.
    assert traffic.counts["tokens_after_ties"] < 0.01 * traffic.counts["tokens"]
    half, last = moments[(ROUNDS - 1) // 2], moments[-1]
    for memory in ("rss", "gpu"):
        assert last[memory] - half[memory] < MAX_GROWTH, memory
    # The traffic must have had aborts, preemptions, prefix cache hits and drafts.
    assert traffic.counts["whole"] > 0 < traffic.counts["aborted"]
    assert found["num_preemptions_total"] > 0 < found["prefix_cache_hits_total"]
    drafts = found["spec_decode_num_drafts_total"]
    assert found["spec_decode_num_accepted_tokens_total"] > 0.5 * drafts
