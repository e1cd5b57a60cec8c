# SPDX-License-Identifier: Apache-2.0
"""What `docs/origins.md` says was measured, or follows from sizes alone."""

import pytest

from benchmarks.spec_decode import results as files
from benchmarks.spec_decode.results import EngineKey, PointKey
from benchmarks.spec_decode.shapes import CONFIGS
from vllm.v1.worker.gpu.spec_decode.unified.layout import DraftLayout

K = (3, 5, 7, 11)
LOADS = (1, 2, 4, 8, 16, 32, 64)
DATA_SETS = ("mt-bench", "humaneval", "speed-bench")


@pytest.fixture(scope="module")
def points() -> dict[str, dict]:
    return files.load(files.RESULTS / "nvidia-h200" / "engine.json")["measurements"]


def draft_seconds(points: dict[str, dict], mode: str, num_tokens: int) -> float:
    """Of the draft passes of a step, with one request."""
    key = PointKey(EngineKey("ours", mode, num_tokens), "equal", 1)
    return files.column(points[str(key)], "draft_s").median


@pytest.mark.parametrize("mode", ["pard", "peagle"])
def test_parallel_drafting_costs_the_same_for_every_k(points, mode: str):
    seconds = [draft_seconds(points, mode, k) for k in K]
    assert max(seconds) < 1.1 * min(seconds)


@pytest.mark.parametrize("mode", ["draft", "eagle3"])
def test_autoregressive_drafting_costs_by_k(points, mode: str):
    seconds = [draft_seconds(points, mode, k) for k in K]
    assert seconds == sorted(seconds)
    assert seconds[-1] > 3 * seconds[0]


@pytest.mark.parametrize("mode", ["draft", "pard", "eagle3", "peagle"])
def test_every_k_at_every_load(points, mode: str):
    keys = {f"ours/{mode}/K{k}/equal/c{n}" for k in K for n in LOADS}
    assert keys <= set(points)


def test_published_acceptance_at_every_load(points):
    modes, lengths = ("eagle3", "peagle"), (3, 7)
    for data_set in DATA_SETS:
        wanted = ((mode, k, n) for mode in modes for k in lengths for n in LOADS)
        for mode, k, n in wanted:
            assert f"ours/{mode}/K{k}/{data_set}/c{n}" in points


def test_heads_are_measured_with_the_posts_depth():
    shapes = CONFIGS["llama-3.1-8b"]
    depths = {mode: shapes[mode]["num_hidden_layers"] for mode in ("eagle3", "peagle")}
    assert depths == {"eagle3": 1, "peagle": 4}
    assert CONFIGS["gpt-oss-20b"]["peagle"]["num_hidden_layers"] == 4


def test_batches_of_the_posts_server():
    """1024 requests, 100000 tokens a step, K = 7: six more slots for each request."""
    layout = DraftLayout(7, 1, 7)
    assert layout.max_num_tokens(100_000, 1024) == 100_000 + 6 * 1024
