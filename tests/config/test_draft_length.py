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

from vllm.config import SpeculativeConfig
from vllm.config.drafter import DrafterConfig, auto
from vllm.config.drafter.auto import settle_auto
from vllm.config.drafter.engine import check_others_choose
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
    tree_sizes,
    trims,
)
from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup

from .specs import engine_config, unresolved


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


def test_explicit_schedule_is_left_to_vllm():
    schedule = [(1, 2, 3), (3, 4, 0)]
    spec = settings(method="medusa", num_speculative_tokens_per_batch_size=schedule)
    assert not is_auto(spec)
    check_auto(spec)  # checks "auto" only
    assert build_dynamic_sd_schedule_lookup(schedule, 5, 3) == [0, 3, 3, 0, 0, 0]
    with pytest.raises(ValueError):
        build_dynamic_sd_schedule_lookup("automatic", 5, 3)


def parallel(**changes) -> dict[str, Any]:
    values = {
        "data_parallel_size": 1,
        "enable_elastic_ep": False,
        "pipeline_parallel_size": 1,
        "distributed_executor_backend": None,
    }
    return {"target_parallel_config": SimpleNamespace(**values | changes)}


MODULES = SimpleNamespace(hf_config=SimpleNamespace(num_nextn_predict_layers=3))
settings = partial(
    unresolved,
    "a/head",
    method="eagle3",
    num_speculative_tokens=7,
    num_speculative_tokens_per_batch_size="auto",
)


@pytest.mark.parametrize(
    "given, refusal, stays_default",
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
    given: dict, refusal: str | None, stays_default: bool, caplog_vllm
):
    spec = settings(**given)
    with pytest.raises(ValueError, match=refusal) if refusal else nullcontext():
        check_auto(spec)
    assert is_auto(spec)
    spec.is_auto_by_default = True
    with caplog_vllm.at_level("INFO", logger="vllm"):
        check_auto(spec)
    assert is_auto(spec) is stays_default
    lines = [] if stays_default else ["Every draft has 7 tokens: "]
    assert [said[:26] for said in caplog_vllm.messages] == lines


@pytest.mark.parametrize(
    "unsupported, is_v2, watermark",
    [
        (None, True, None),
        (None, False, None),
        ("context parallelism", True, None),
        (None, True, "some"),
    ],
)
def test_default_auto_needs_unified_speculator(unsupported, is_v2, watermark):
    drafter = DrafterConfig("draft_model", 7, unsupported=unsupported)
    config = SimpleNamespace(use_v2_model_runner=is_v2, watermark_config=watermark)
    config.scheduler_config = SimpleNamespace(max_num_seqs=MIN_REQUESTS_BY_DEFAULT)
    config.parallel_config = SimpleNamespace(data_parallel_size=2)
    runs = unsupported is None and is_v2 and watermark is None

    def settle(**given: Any) -> bool:
        config.speculative_config = settings(drafter=drafter, **given)
        settled = settle_auto(config)
        assert settled == is_auto(config.speculative_config)
        return settled

    assert settle(is_auto_by_default=True) == runs
    assert settle()  # if set explicitly, another check refuses it
    trimmed = {"enable_adaptive_verification": True}
    assert settle(num_speculative_tokens_per_batch_size=None, **trimmed) == runs
    config.speculative_config = None
    assert not settle_auto(config)


OTHER = DrafterConfig("mtp", 3, unsupported="method mtp")


@pytest.mark.parametrize("method", ["mtp", "dflash", "dspark", "ngram", "eagle3"])
def test_explicit_auto_with_other_speculators(method: str):
    """One-pass drafters too, without trees: those need the unified speculator."""
    drafter = replace(OTHER, method=method, is_parallel=True, parallel_width=3)
    spec = settings(method=method, drafter=drafter)
    check_auto(spec)
    config = SimpleNamespace(speculative_config=spec, use_v2_model_runner=True)
    assert settle_auto(config)
    assert chosen_lengths(spec) == [0, 1, 2, 3]
    check_others_choose(config, drafter)


@pytest.mark.parametrize(
    "changes, is_v2, is_adaptive, why",
    [
        ({}, False, False, "Model Runner V1"),
        ({}, True, True, "enable_adaptive_verification"),
        ({"method": "eagle3", "unsupported": "watermarks"}, False, False, "watermarks"),
        ({"is_unified": True}, True, True, None),
    ],
)
def test_unsupported_auto_with_other_speculators(
    changes: dict, is_v2: bool, is_adaptive: bool, why: str | None
):
    spec = settings(enable_adaptive_verification=is_adaptive)
    config = SimpleNamespace(speculative_config=spec, use_v2_model_runner=is_v2)
    refusal = f'"auto" does not support {why}.*: turn that'
    with pytest.raises(ValueError, match=refusal) if why else nullcontext():
        check_others_choose(config, replace(OTHER, **changes))


@pytest.mark.parametrize("drafter", ["draft", "eagle3", "peagle"])
def test_schedule_sets_k(drafter: str, models):
    """Regression: longer drafts than a file's, or the default, were cut to that length
    without a word."""
    schedule = [[1, 8, 9], [9, 64, 2]]
    spec = {"model": str(models / drafter)}
    spec["num_speculative_tokens_per_batch_size"] = schedule
    found = engine_config(models / "target", spec).speculative_config
    assert found.num_speculative_tokens == 9
    assert found.drafter.num_speculative_tokens == 9


def test_auto_schedule_keeps_its_lengths():
    schedule = AutoSchedule([0, 3, 7, 15])
    for same in (schedule, copy(schedule), pickle.loads(pickle.dumps(schedule))):
        assert same == "auto"
        assert same.lengths == (0, 3, 7, 15)
    assert set(covering_lookup(64, 15, schedule)[1:]) == {0, 3, 7, 15}
    lookup = build_dynamic_sd_schedule_lookup(schedule, 64, 15)
    assert set(lookup[1:]) == {0, 3, 7, 15}


@pytest.fixture
def on_gpu(monkeypatch) -> None:
    platform = SimpleNamespace(is_cpu=lambda: False)
    monkeypatch.setattr(auto, "current_platform", platform)


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
    spec = {"model": str(models / "pard")}
    found = engine_config(models / "target", spec, **engine).speculative_config
    assert max(chosen_lengths(found)) == most


def test_targets_with_a_state_have_no_trees_by_default(on_gpu):
    """They would keep a state for each node, only to verify chains."""
    parallel = SimpleNamespace(data_parallel_size=1, pipeline_parallel_size=1)
    scheduler = SimpleNamespace(max_num_batched_tokens=512, max_num_seqs=8)
    for has_state, most in ((False, 27), (True, 7)):
        model = SimpleNamespace(max_model_len=4096, has_inner_state=has_state)
        config = SimpleNamespace(
            use_v2_model_runner=True,
            watermark_config=None,
            parallel_config=parallel,
            scheduler_config=scheduler,
            model_config=model,
            speculative_config=settings(drafter=DrafterConfig("eagle3", 7)),
        )
        assert settle_auto(config)
        assert max(chosen_lengths(config.speculative_config)) == most


# Adaptive verification.


@pytest.mark.parametrize("schedule", [None, "auto"])
@pytest.mark.parametrize("method", ["draft_model", "eagle3"])
def test_adaptive_verification_with_auto(method: str, schedule, on_gpu):
    """Together with trees. A number set by the user keeps its meaning."""
    drafter = DrafterConfig(method, 7, parallel_width=7, is_parallel=True)
    spec = settings(
        method=method,
        drafter=drafter,
        num_speculative_tokens_per_batch_size=schedule,
        enable_adaptive_verification=True,
    )
    config = SimpleNamespace(
        speculative_config=spec,
        use_v2_model_runner=True,
        parallel_config=SimpleNamespace(data_parallel_size=1, pipeline_parallel_size=1),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=4096),
        model_config=SimpleNamespace(max_model_len=4096, has_inner_state=False),
    )
    for _ in range(2):  # settling again changes nothing
        assert settle_auto(config)
        expected = [7] if schedule is None else candidate_lengths(7, max(TREES))
        assert chosen_lengths(spec) == expected
        assert lengths_vary(spec) == (schedule is not None)
    assert not trims(spec)  # until the unified speculator is known to draft
    spec.drafter = replace(drafter, is_unified=True)
    assert trims(spec)


@pytest.mark.parametrize("schedule", [None, "auto"])
def test_fixed_trees_are_not_trimmed(schedule, models, on_gpu, caplog_vllm):
    """With a tree in every step there is nothing to trim, and one log line says so."""
    given = {"draft_tree": 31, "enable_adaptive_verification": True}
    given["num_speculative_tokens_per_batch_size"] = schedule
    spec = by_default(models, spec=given)
    assert spec.drafter.is_unified and spec.drafter.num_nodes == 31
    assert trims(spec) is (schedule == "auto")
    names = "enable_adaptive_verification does nothing beside draft_tree=31"
    said = [line for line in caplog_vllm.messages if line.startswith(names)]
    assert len(said) == (schedule is None)


# Adaptive verification as a default, part of "auto".


def by_default(models, **engine: Any) -> SpeculativeConfig:
    """Config of an engine that is given the drafter only, and what `spec` adds."""
    spec = {"model": str(models / "pard")} | engine.pop("spec", {})
    return engine_config(models / "target", spec, **engine).speculative_config


@pytest.mark.parametrize(
    "given, is_given",
    [
        ({}, True),
        ({"enable_adaptive_verification": False}, False),
        ({"enable_adaptive_verification": True}, True),
        # A number set by the user keeps its meaning.
        ({"num_speculative_tokens": 7}, False),
        ({"num_speculative_tokens_per_batch_size": "auto"}, True),
    ],
)
def test_adaptive_verification_is_default(given: dict, is_given: bool, models, on_gpu):
    """With trees and chains to choose from, too."""
    spec = by_default(models, spec=given)
    assert trims(spec) is is_given
    is_default = "enable_adaptive_verification" not in given
    assert spec.is_trimmed_by_default is (is_given and is_default)
    assert is_auto(spec) is (given != {"num_speculative_tokens": 7})
    assert not is_auto(spec) or chosen_lengths(spec)[-1] == max(TREES)


def engine_with(**changes: Any) -> SimpleNamespace:
    """The parts of an engine's config that are read; `changes` updates each part."""
    parts = {
        "parallel_config": {
            "data_parallel_size": 1,
            "pipeline_parallel_size": 1,
            "enable_batch_sharded_sampling": False,
        },
        "model_config": {
            "return_sampling_mask": False,
            "use_mla": False,
            "has_inner_state": False,
            "max_model_len": 4096,
        },
        "scheduler_config": {"max_num_batched_tokens": 4096, "max_num_seqs": 256},
        "aux_output_config": {"enabled": False},
        "speculative_config": {},
        "lora_config": None,
    }
    for name, change in changes.items():
        parts[name] = {**parts[name], **change} if parts[name] is not None else change
    spec = settings(
        drafter=DrafterConfig("eagle3", 7, is_parallel=True),
        is_auto_by_default=True,
        enable_adaptive_verification=None,
        **parts.pop("speculative_config"),
    )
    made = {k: v if v is None else SimpleNamespace(**v) for k, v in parts.items()}
    return SimpleNamespace(speculative_config=spec, use_v2_model_runner=True, **made)


@pytest.mark.parametrize(
    "changes, what",
    [
        ({}, None),
        ({"lora_config": {}}, "LoRA"),
        ({"parallel_config": {"data_parallel_size": 2}}, "data parallelism"),
        ({"parallel_config": {"pipeline_parallel_size": 2}}, "pipeline parallelism"),
        (
            {"parallel_config": {"enable_batch_sharded_sampling": True}},
            "batch-sharded sampling",
        ),
        ({"model_config": {"return_sampling_mask": True}}, "returned sampling masks"),
        ({"model_config": {"use_mla": True}}, "MLA"),
        ({"aux_output_config": {"enabled": True}}, "returned routed experts"),
        (
            {"speculative_config": {"use_local_argmax_reduction": True}},
            "use_local_argmax_reduction",
        ),
    ],
)
def test_unsupported_adaptive_default_is_logged(
    changes: dict, what: str | None, on_gpu, caplog_vllm
):
    config = engine_with(**changes)
    with caplog_vllm.at_level("INFO", logger="vllm"):
        for _ in range(2):  # settling again changes nothing
            assert settle_auto(config)
    spec = config.speculative_config
    assert is_auto(spec)
    assert spec.enable_adaptive_verification is spec.is_trimmed_by_default
    assert spec.enable_adaptive_verification is (what is None)
    said = [line for line in caplog_vllm.messages if "verifies all its drafts" in line]
    assert [line.endswith(f"support {what}.") for line in said] == [True] * len(changes)


@pytest.mark.parametrize(
    "drafter, max_num_seqs, is_given",
    [
        ("pard", MIN_REQUESTS_BY_DEFAULT, True),
        ("pard", MIN_REQUESTS_BY_DEFAULT - 1, False),
        ("peagle", MIN_REQUESTS_BY_DEFAULT, True),
        ("eagle3", MIN_REQUESTS_BY_DEFAULT, False),
        ("draft", MIN_REQUESTS_BY_DEFAULT, False),
    ],
)
def test_adaptive_default_only_where_it_gains(
    drafter: str, max_num_seqs: int, is_given: bool, models, on_gpu, caplog_vllm
):
    """Elsewhere nothing is logged. If set explicitly, it is always enabled."""
    given = {"model": str(models / drafter)}
    with caplog_vllm.at_level("INFO", logger="vllm"):
        spec = by_default(models, spec=given, max_num_seqs=max_num_seqs)
    assert is_auto(spec) and trims(spec) is is_given
    assert "verifies all its drafts" not in caplog_vllm.text
    given["enable_adaptive_verification"] = True
    assert trims(by_default(models, spec=given, max_num_seqs=max_num_seqs))


def test_adaptive_default_is_off_with_lora(models, on_gpu):
    """vLLM refuses LoRA if adaptive verification is set explicitly."""
    spec = by_default(models, enable_lora=True)
    assert is_auto(spec) and not trims(spec)
    asked = {"enable_adaptive_verification": True}
    with pytest.raises(ValueError, match="not currently compatible with LoRA"):
        by_default(models, enable_lora=True, spec=asked)


def test_adaptive_default_is_off_on_cpu(models, caplog_vllm):
    if not auto.current_platform.is_cpu():
        pytest.skip("runs on another platform")
    with caplog_vllm.at_level("INFO", logger="vllm"):
        assert not trims(by_default(models))
    assert "batches does not support a CPU." in caplog_vllm.text
