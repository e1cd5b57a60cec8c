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
    chosen_lengths,
    covering_lookup,
    depth_of,
    is_auto,
    lengths_vary,
    settle_lengths,
    tree_sizes,
    trims,
)
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
    assert not is_auto(settings(num_speculative_tokens_per_batch_size=schedule))
    assert build_dynamic_sd_schedule_lookup(schedule, 5, 3) == [0, 3, 3, 0, 0, 0]
    with pytest.raises(ValueError):
        build_dynamic_sd_schedule_lookup("automatic", 5, 3)


# What "auto" does not support.

MODULES = SimpleNamespace(hf_config=SimpleNamespace(num_nextn_predict_layers=3))
OURS, BLOCK = {"is_unified": True}, {"is_block": True}
ADAPTIVE = {"enable_adaptive_verification": True}


@pytest.mark.parametrize(
    "method, drafter, changes, engine, refusal, fixes",
    [
        # What is refused if the user asks for it, and why it is not the default.
        ("eagle3", OURS, {}, {}, None, None),
        ("eagle3", OURS, {}, {"pipeline_parallel_size": 2}, None, "pipeline paral"),
        ("eagle3", OURS, {}, {"enable_elastic_ep": True}, "enable_elastic_ep", ...),
        (
            "eagle3",
            OURS,
            {},
            {"distributed_executor_backend": "external_launcher"},
            "choose by its own clock",
            ...,
        ),
        ("medusa", {"unsupported": "method medusa"}, {}, {}, "method medusa", ...),
        ("mtp", {}, {"draft_model_config": MODULES}, {}, "mtp of several modules", ...),
        # vLLM's own speculators: its adaptive verification chooses, too.
        ("eagle3", {"unsupported": "LoRA"}, {}, {}, None, "support LoRA"),
        ("eagle3", {}, ADAPTIVE, {}, "enable_adaptive_verification", ...),
        ("eagle3", {}, {}, {"is_v2": False}, "Model Runner V1", ...),
        ("ngram", {}, {}, {}, None, None),
        ("ngram", {}, {}, {"is_v2": False}, "Model Runner V1", ...),
        ("dspark", BLOCK, {}, {}, None, None),
        ("dspark", BLOCK, ADAPTIVE, {}, "enable_adaptive_verification", ...),
        ("dspark", BLOCK | {"no_lattice": "its head"}, {}, {}, None, "its head"),
        ("dspark", {}, {}, {"is_v2": False}, "Model Runner V1", ...),
    ],
)
def test_auto_is_refused_or_not_the_default(
    method: str, drafter, changes, engine, refusal, fixes, caplog_vllm
):
    engine = {"is_v2": True, "enable_elastic_ep": False} | engine
    values = {"data_parallel_size": 2, "pipeline_parallel_size": 1}
    values |= {"distributed_executor_backend": None} | engine
    config = SimpleNamespace(
        speculative_config=settings(method=method, **changes),
        use_v2_model_runner=values.pop("is_v2"),
        parallel_config=SimpleNamespace(**values),
        scheduler_config=SimpleNamespace(max_num_seqs=8),
    )
    resolved = DrafterConfig(method, 7, **drafter)
    refuses = pytest.raises(ValueError, match=f"does not support .*{refusal}")
    with refuses if refusal else nullcontext():
        assert settle_lengths(config, resolved)[1].lengths == (0, 1, 2, 3, 4, 5, 7)
    config.speculative_config.is_auto_by_default = True
    with caplog_vllm.at_level("INFO", logger="vllm"):
        schedule = settle_lengths(config, resolved)[1]
    if fixes is None:
        assert schedule == "auto"
        return
    assert schedule is None
    (line,) = caplog_vllm.messages
    assert line.startswith("Every draft has 7 tokens: ")
    assert (refusal if fixes is ... else fixes).partition(":")[0] in line


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


OFF, SEVEN = {"enable_adaptive_verification": False}, {"num_speculative_tokens": 7}
BY_LOAD = {"num_speculative_tokens_per_batch_size": "auto"}
FEW = MIN_REQUESTS_BY_DEFAULT - 1


@pytest.mark.parametrize(
    "drafter, spec, max_num_seqs, is_trimmed, longest",
    [
        ("pard", {}, FEW + 1, True, 63),
        ("pard", OFF, FEW + 1, False, 63),
        ("pard", ADAPTIVE, FEW, True, 63),
        ("pard", BY_LOAD, FEW + 1, True, 63),
        # A number set by the user keeps its meaning.
        ("pard", SEVEN, FEW + 1, False, None),
        ("pard", SEVEN | ADAPTIVE, FEW, True, 7),
        ("eagle3", SEVEN | ADAPTIVE, FEW, True, 7),
        ("eagle3", SEVEN | ADAPTIVE | BY_LOAD, FEW, True, 27),
        # By default only where it gains something.
        ("pard", {}, FEW, False, 63),
        ("peagle", {}, FEW + 1, True, 63),
        ("eagle3", {}, FEW + 1, False, 27),
        ("draft", {}, FEW + 1, False, 27),
    ],
)
def test_adaptive_verification(
    drafter, spec: dict, max_num_seqs, is_trimmed, longest, models, on_gpu, caplog_vllm
):
    """Beside trees and chains to choose from, too. Where it is off, nothing is said."""
    with caplog_vllm.at_level("INFO", logger="vllm"):
        found = by_default(models, drafter, spec=spec, max_num_seqs=max_num_seqs)
    assert "verifies all its drafts" not in caplog_vllm.text
    assert trims(found) is is_trimmed
    is_default = "enable_adaptive_verification" not in spec
    assert found.drafter.is_trimmed_by_default is (is_trimmed and is_default)
    assert is_auto(found) is (longest is not None)
    assert not is_auto(found) or chosen_lengths(found)[-1] == longest
    assert lengths_vary(found) == (longest not in (None, 7))


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
    with pytest.raises(ValueError, match="not currently compatible with LoRA"):
        by_default(models, enable_lora=True, spec=ADAPTIVE)


def test_adaptive_default_is_off_on_cpu(models, on_cpu, caplog_vllm):
    if not on_cpu:
        pytest.skip("runs on another platform")
    with caplog_vllm.at_level("INFO", logger="vllm"):
        assert not trims(by_default(models))
    assert "batches does not support a CPU." in caplog_vllm.text
