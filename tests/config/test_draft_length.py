# SPDX-License-Identifier: Apache-2.0
"""`num_speculative_tokens_per_batch_size="auto"` in the config."""

import pickle
from contextlib import nullcontext
from copy import copy
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from vllm.config import ModelConfig, SpeculativeConfig
from vllm.config.drafter import DrafterConfig, length
from vllm.config.drafter.length import (
    MIN_REQUESTS_BY_DEFAULT,
    TREES,
    AutoSchedule,
    candidate_lengths,
    check_auto,
    chosen_lengths,
    covering_lookup,
    depth_of,
    is_auto,
    lengths_vary,
    settle_lengths,
    tree_sizes,
    trims,
)
from vllm.config.drafter.support import check_speculator
from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup

from .specs import engine_config, unresolved

settings = partial(
    unresolved,
    "a/head",
    method="eagle3",
    num_speculative_tokens=7,
    num_speculative_tokens_per_batch_size="auto",
)


@pytest.fixture
def on_gpu(monkeypatch) -> None:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    platform = SimpleNamespace(is_cpu=lambda: False)
    monkeypatch.setattr(length, "current_platform", platform)


# Candidates.


@pytest.mark.parametrize(
    "depth, nodes, lengths",
    [
        (1, None, [0, 1]),
        (6, None, [0, 1, 2, 3, 4, 5, 6]),
        (15, None, [0, 1, 2, 3, 4, 5, 7, 9, 12, 15]),
        # Trees are candidates beyond the longest chain.
        (7, 7, [0, 1, 2, 3, 4, 5, 7]),
        (7, 20, [0, 1, 2, 3, 4, 5, 7, 11, 15, 20]),
        (7, 63, [0, 1, 2, 3, 4, 5, 7, 11, 15, 23, 31, 47, 63]),
    ],
)
def test_candidate_lengths(depth: int, nodes: int | None, lengths: list[int]):
    assert candidate_lengths(depth, nodes) == lengths


def test_trees_to_choose_from():
    """With one pass for each depth, small trees have less of it."""
    one_pass = DrafterConfig("draft_model", 7, is_parallel=True, parallel_width=7)
    assert tree_sizes(one_pass) == [*TREES]
    assert tree_sizes(replace(one_pass, parallel_width=3)) == []
    each = DrafterConfig("eagle3", 7)
    assert tree_sizes(each) == [11, 15, 19, 23, 27]
    assert tree_sizes(replace(each, num_speculative_tokens=2)) == [7]
    assert tree_sizes(replace(each, num_speculative_tokens=1)) == []

    def depths(drafter: DrafterConfig, schedule: str | None) -> list[int]:
        spec = settings(drafter=drafter, num_speculative_tokens_per_batch_size=schedule)
        return [depth_of(spec, n) for n in (0, 3, 7, 11, 15, 27, 31)]

    assert depths(each, "auto") == [0, 3, 7, 3, 4, 7, 7]
    assert depths(each, None) == depths(one_pass, "auto") == [0, 3, 7, 7, 7, 7, 7]


@pytest.mark.parametrize("max_batch_size", [1, 2, 5, 8, 256])
def test_graph_lookup_has_all_candidates(max_batch_size: int):
    lookup = build_dynamic_sd_schedule_lookup("auto", max_batch_size, 7)
    assert lookup == covering_lookup(max_batch_size, 7)
    assert set(lookup[1:]) == set(candidate_lengths(7))
    assert len(lookup) > max_batch_size
    if max_batch_size == 256:  # graphs are captured up to the last batch with a length
        assert lookup[-7:] == candidate_lengths(7)


def test_auto_schedule_keeps_its_lengths():
    schedule = AutoSchedule([0, 3, 7, 15])
    for same in (schedule, copy(schedule), pickle.loads(pickle.dumps(schedule))):
        assert same == "auto"
        assert same.lengths == (0, 3, 7, 15)
    lookup = build_dynamic_sd_schedule_lookup(schedule, 64, 15)
    assert set(lookup[1:]) == {0, 3, 7, 15}


def test_explicit_schedule_is_left_to_vllm():
    schedule = [(1, 2, 3), (3, 4, 0)]
    spec = settings(method="medusa", num_speculative_tokens_per_batch_size=schedule)
    assert not is_auto(spec)
    check_auto(spec)  # checks "auto" only
    assert build_dynamic_sd_schedule_lookup(schedule, 5, 3) == [0, 3, 3, 0, 0, 0]
    with pytest.raises(ValueError):
        build_dynamic_sd_schedule_lookup("automatic", 5, 3)


@pytest.mark.parametrize("drafter", ["draft", "eagle3", "peagle"])
def test_schedule_sets_k(drafter: str, models):
    """Regression: longer drafts than a file's, or the default, were cut to that length
    without a word."""
    spec = {"model": str(models / drafter)}
    spec["num_speculative_tokens_per_batch_size"] = [[1, 8, 9], [9, 64, 2]]
    found = engine_config(models / "target", spec).speculative_config
    assert found.num_speculative_tokens == 9
    assert found.drafter.num_speculative_tokens == 9


# What "auto" does not support.


def parallel(**changes) -> dict[str, Any]:
    values = {
        "data_parallel_size": 1,
        "enable_elastic_ep": False,
        "pipeline_parallel_size": 1,
        "distributed_executor_backend": None,
    }
    return {"target_parallel_config": SimpleNamespace(**values | changes)}


MODULES = SimpleNamespace(hf_config=SimpleNamespace(num_nextn_predict_layers=3))


@pytest.mark.parametrize(
    "changes, refusal, stays_default",
    [
        ({}, None, True),
        (parallel(data_parallel_size=2), None, True),
        # Several steps in flight: only if set explicitly.
        (parallel(pipeline_parallel_size=2), None, False),
        (
            parallel(data_parallel_size=2, enable_elastic_ep=True),
            "enable_elastic_ep",
            False,
        ),
        (
            parallel(distributed_executor_backend="external_launcher"),
            "choose by its own clock",
            False,
        ),
        ({"method": "medusa"}, "method medusa: give num_spec", False),
        (
            {"method": "mtp", "draft_model_config": MODULES},
            "method mtp of several modules",
            False,
        ),
    ],
)
def test_unsupported_auto_is_refused_or_falls_back(
    changes: dict, refusal: str | None, stays_default: bool, caplog_vllm
):
    spec = settings(**changes)
    with pytest.raises(ValueError, match=refusal) if refusal else nullcontext():
        check_auto(spec)
    assert is_auto(spec)
    spec.is_auto_by_default = True
    with caplog_vllm.at_level("INFO", logger="vllm"):
        check_auto(spec)
    assert is_auto(spec) is stays_default
    lines = [] if stays_default else ["Every draft has 7 tokens: "]
    assert [line[:26] for line in caplog_vllm.messages] == lines


@pytest.mark.parametrize("method", ["mtp", "dflash", "dspark", "ngram", "eagle3"])
@pytest.mark.parametrize(
    "is_v2, is_trimmed, why",
    [
        (True, False, None),
        (False, False, "Model Runner V1"),
        (True, True, "enable_adaptive_verification"),
    ],
)
def test_explicit_auto_with_other_speculators(method, is_v2: bool, is_trimmed, why):
    """One-pass drafters too, without trees: those need the unified speculator."""
    drafter = DrafterConfig(method, 3, is_parallel=True, parallel_width=3)
    spec = settings(method=method, enable_adaptive_verification=is_trimmed)
    config = SimpleNamespace(speculative_config=spec, use_v2_model_runner=is_v2)
    drafter, schedule, found = settle_lengths(config, drafter)
    assert schedule.lengths == (0, 1, 2, 3) and found is is_trimmed
    refusal = f'"auto" does not support {why}.*: turn that'
    with pytest.raises(ValueError, match=refusal) if why else nullcontext():
        check_speculator(config, drafter, schedule, is_trimmed)
    check_speculator(config, replace(drafter, is_unified=True), schedule, is_trimmed)


@pytest.mark.parametrize(
    "changes, is_auto_here",
    [
        ({"is_auto_by_default": True}, False),
        ({}, True),  # if set explicitly, another check refuses it
        (
            {
                "num_speculative_tokens_per_batch_size": None,
                "enable_adaptive_verification": True,
            },
            False,
        ),
    ],
)
@pytest.mark.parametrize("is_unified", [True, False])
def test_default_auto_needs_unified_speculator(changes, is_auto_here, is_unified):
    drafter = DrafterConfig("draft_model", 7, is_unified=is_unified)
    spec = settings(**{"enable_adaptive_verification": False} | changes)
    config = SimpleNamespace(
        speculative_config=spec, parallel_config=SimpleNamespace(data_parallel_size=2)
    )
    schedule = settle_lengths(config, drafter)[1]
    assert (schedule == "auto") == (is_unified or is_auto_here)


@pytest.mark.parametrize(
    "settled, is_trimmed, chooses",
    [
        ({"is_block": True}, None, True),
        ({"is_block": True}, True, False),
        ({"is_block": True, "no_lattice": "its head"}, None, False),
        ({}, None, False),  # Runner V1
    ],
)
def test_default_auto_of_dspark(settled: dict, is_trimmed, chooses: bool):
    """Its own adaptive verification chooses how much to verify of a fixed length."""
    spec = settings(method="dspark", is_auto_by_default=True)
    spec.enable_adaptive_verification = is_trimmed
    parallel = SimpleNamespace(data_parallel_size=2)
    config = SimpleNamespace(speculative_config=spec, parallel_config=parallel)
    config.scheduler_config = SimpleNamespace(max_num_seqs=8)
    schedule = settle_lengths(config, DrafterConfig("dspark", 7, **settled))[1]
    assert (schedule == "auto") == chooses


# Which trees it chooses from.


@pytest.mark.parametrize(
    "limits, most",
    [
        ({}, 63),
        ({"max_num_batched_tokens": 48}, 47),
        ({"max_num_batched_tokens": 32}, 31),
        ({"max_model_len": 24}, 23),
        ({"max_num_batched_tokens": 11, "max_num_seqs": 1}, 8),  # the longest chain
    ],
)
def test_trees_fit_into_limits_of_a_step(limits: dict, most: int, models, on_gpu):
    engine = {"max_model_len": 128, "max_num_batched_tokens": 512} | limits
    assert max(chosen_lengths(by_default(models, **engine))) == most


# Adaptive verification, set or by default as a part of "auto".


def by_default(models, drafter: str = "pard", **engine: Any) -> SpeculativeConfig:
    """Config of an engine that is told the drafter only, and what `spec` adds."""
    spec = {"model": str(models / drafter)} | engine.pop("spec", {})
    return engine_config(models / "target", spec, **engine).speculative_config


@pytest.mark.parametrize("schedule", [None, "auto"])
@pytest.mark.parametrize("drafter", ["pard", "eagle3"])
def test_adaptive_verification_with_auto(drafter: str, schedule, models, on_gpu):
    """Together with trees. A number set by the user keeps its meaning."""
    spec = {"num_speculative_tokens": 7, "enable_adaptive_verification": True}
    spec["num_speculative_tokens_per_batch_size"] = schedule
    found = by_default(models, drafter, spec=spec)
    trees = tree_sizes(found.drafter)
    expected = [7] if schedule is None else candidate_lengths(7, trees[-1], trees)
    assert chosen_lengths(found) == expected
    assert lengths_vary(found) == (schedule is not None)
    assert trims(found) and not found.drafter.is_trimmed_by_default


@pytest.mark.parametrize("schedule", [None, "auto"])
def test_fixed_trees_are_not_trimmed(schedule, models, on_gpu, caplog_vllm):
    """With a tree in every step there is nothing to trim, and one log line says so."""
    spec = {"draft_tree": 31, "enable_adaptive_verification": True}
    spec["num_speculative_tokens_per_batch_size"] = schedule
    spec = by_default(models, spec=spec)
    assert spec.drafter.is_unified and spec.drafter.num_nodes == 31
    assert trims(spec) is (schedule == "auto")
    names = "enable_adaptive_verification does nothing beside draft_tree=31"
    lines = [line for line in caplog_vllm.messages if line.startswith(names)]
    assert len(lines) == (schedule is None)


@pytest.mark.parametrize(
    "spec, is_trimmed",
    [
        ({}, True),
        ({"enable_adaptive_verification": False}, False),
        ({"enable_adaptive_verification": True}, True),
        # A number set by the user keeps its meaning.
        ({"num_speculative_tokens": 7}, False),
        ({"num_speculative_tokens_per_batch_size": "auto"}, True),
    ],
)
def test_adaptive_verification_is_default(spec: dict, is_trimmed, models, on_gpu):
    """With trees and chains to choose from, too."""
    found = by_default(models, spec=spec)
    assert trims(found) is is_trimmed
    is_default = "enable_adaptive_verification" not in spec
    assert found.drafter.is_trimmed_by_default is (is_trimmed and is_default)
    assert is_auto(found) is (spec != {"num_speculative_tokens": 7})
    assert not is_auto(found) or chosen_lengths(found)[-1] == max(TREES)


@pytest.mark.parametrize(
    "drafter, max_num_seqs, is_trimmed",
    [
        ("pard", MIN_REQUESTS_BY_DEFAULT, True),
        ("pard", MIN_REQUESTS_BY_DEFAULT - 1, False),
        ("peagle", MIN_REQUESTS_BY_DEFAULT, True),
        ("eagle3", MIN_REQUESTS_BY_DEFAULT, False),
        ("draft", MIN_REQUESTS_BY_DEFAULT, False),
    ],
)
def test_adaptive_default_only_where_it_gains(
    drafter: str, max_num_seqs: int, is_trimmed: bool, models, on_gpu, caplog_vllm
):
    """Elsewhere nothing is logged. If set explicitly, it is always enabled."""
    with caplog_vllm.at_level("INFO", logger="vllm"):
        spec = by_default(models, drafter, max_num_seqs=max_num_seqs)
    assert is_auto(spec) and trims(spec) is is_trimmed
    assert "verifies all its drafts" not in caplog_vllm.text
    asked = {"enable_adaptive_verification": True}
    assert trims(by_default(models, drafter, spec=asked, max_num_seqs=max_num_seqs))


@pytest.mark.parametrize("has_state, most", [(False, 27), (True, 7)])
def test_targets_with_a_state_have_no_trees_by_default(
    has_state: bool, most: int, models, on_gpu, monkeypatch
):
    """They would keep a state for each node, only to verify chains."""
    monkeypatch.setattr(ModelConfig, "has_inner_state", has_state)
    assert chosen_lengths(by_default(models, "eagle3"))[-1] == most


def test_adaptive_default_is_off_with_lora(models, on_gpu, caplog_vllm):
    """One log line says so. vLLM refuses LoRA if it is set explicitly."""
    with caplog_vllm.at_level("INFO", logger="vllm"):
        spec = by_default(models, enable_lora=True)
    assert is_auto(spec) and not trims(spec)
    assert not spec.drafter.is_trimmed_by_default
    (line,) = (line for line in caplog_vllm.messages if "all its drafts" in line)
    assert line.endswith("support LoRA.")
    asked = {"enable_adaptive_verification": True}
    with pytest.raises(ValueError, match="not currently compatible with LoRA"):
        by_default(models, enable_lora=True, spec=asked)


def test_adaptive_default_is_off_on_cpu(models, on_cpu, caplog_vllm):
    if not on_cpu:
        pytest.skip("runs on another platform")
    with caplog_vllm.at_level("INFO", logger="vllm"):
        assert not trims(by_default(models))
    assert "batches does not support a CPU." in caplog_vllm.text
