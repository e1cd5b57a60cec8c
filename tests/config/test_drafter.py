# SPDX-License-Identifier: Apache-2.0
"""Resolving a checkpoint, settings and the engine to `speculative_config.drafter`."""

import logging
import pickle
from contextlib import nullcontext
from dataclasses import FrozenInstanceError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vllm.config import SpeculativeConfig, replace
from vllm.config.drafter import DrafterConfig, files
from vllm.config.drafter.files import read_files
from vllm.config.drafter.resolve import (
    find_unsupported,
    log_who_drafts,
    resolve_drafter,
)
from vllm.config.drafter.target import check_parallelism, find_context
from vllm.triton_utils import HAS_TRITON
from vllm.triton_utils.compiled import COMPILED

from .specs import Checkpoint, cached, checkpoint, engine_config, unresolved

__all__ = ["checkpoint"]  # a fixture
LLAMA = {"model_type": "llama"}
TRAINED_FOR_8 = LLAMA | {
    "speculators_config": {"proposal_methods": [{"speculative_tokens": 8}]}
}


@pytest.fixture(autouse=True)
def runner(monkeypatch) -> None:
    """Runner V2, as on a GPU."""
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")


# Settings that are filled in.


@pytest.mark.parametrize(
    "name, is_parallel",
    [("mask_hidden", True), ("model.mask_hidden", True), ("mask_hidden.fc", False)],
)
@pytest.mark.parametrize("is_on_hub", [False, True])
def test_mask_hidden_enables_parallel_drafting(
    checkpoint: Checkpoint, monkeypatch, name: str, is_parallel: bool, is_on_hub: bool
):
    folder = checkpoint(LLAMA | {"mask_token_id": 3}, ["fc.weight", name])
    model = cached(folder, "someone/head", monkeypatch) if is_on_hub else folder
    files._hub_tensors.cache_clear()  # of another case
    spec = unresolved(model, method="eagle3", num_speculative_tokens=7)
    read_files(spec)
    assert spec.parallel_drafting is is_parallel


@pytest.mark.parametrize(
    "config, settings, num_drafts",
    [
        (TRAINED_FOR_8, {}, 8),
        (TRAINED_FOR_8, {"num_speculative_tokens": 3}, 3),
        (LLAMA, {"method": "draft_model"}, 7),
        (LLAMA | {"draft_vocab_size": 32}, {}, 7),
        (TRAINED_FOR_8, {"num_speculative_tokens_per_batch_size": [(1, 8, 3)]}, 3),
        (TRAINED_FOR_8, {"num_speculative_tokens_per_batch_size": [(1, 8, 9)]}, 9),
        (LLAMA, {"num_speculative_tokens_per_batch_size": [(1, 8, 9)]}, 9),
        (TRAINED_FOR_8, {"draft_tree": 31}, 8),
        (TRAINED_FOR_8, {"method": "mtp"}, 7),  # the file is the target's
    ],
)
def test_num_drafts_and_auto_by_default(
    checkpoint: Checkpoint, config: dict, settings: dict, num_drafts: int
):
    if config is TRAINED_FOR_8:
        settings = {"method": "draft_model"} | settings
    spec = unresolved(checkpoint(config), **settings)
    read_files(spec)
    assert spec.num_speculative_tokens == num_drafts
    assert spec.parallel_drafting is False
    is_auto = set(settings) <= {"method"}
    schedule = spec.num_speculative_tokens_per_batch_size
    assert (schedule == "auto") == spec.is_auto_by_default == is_auto


@pytest.mark.parametrize(
    "config, settings, line",
    [
        (
            {"mask_token_id": 3},
            {"method": "eagle3"},
            "set method and parallel_drafting",
        ),
        ({"pard_token": 4}, {"parallel_drafting": False}, "unset parallel_drafting"),
    ],
)
def test_warnings_about_parallel_drafting(
    checkpoint, config, settings, line, caplog_vllm
):
    read_files(unresolved(checkpoint(config), num_speculative_tokens=7, **settings))
    (record,) = caplog_vllm.records
    assert line in record.getMessage()


@pytest.mark.parametrize(
    "config, asked, warns",
    [
        ({}, 8, False),
        ({}, 9, True),
        ({"mask_token_id": None, "parallel_drafting": False}, 9, False),
        ({"speculators_config": {}, "num_depths": 8}, 9, True),
        ({"speculators_config": {}}, 200, False),  # unknown
        ({"speculators_config": {}, "num_depths": "8"}, 9, False),
    ],
)
def test_more_drafts_than_trained_warns(
    checkpoint: Checkpoint, config: dict, asked: int, warns: bool, caplog_vllm
):
    """With a warning only, since vLLM accepts any number."""
    trained = TRAINED_FOR_8 | {"mask_token_id": 3, "parallel_drafting": True}
    read_files(unresolved(checkpoint(trained | config), num_speculative_tokens=asked))
    line = "was trained to draft 8 tokens at once"
    assert (line in caplog_vllm.text) == warns


@pytest.mark.parametrize(
    "drafter, runner, size", [("draft", "1", 1), ("eagle3", "1", 2), ("draft", "0", 2)]
)
def test_draft_tensor_parallel_size(
    models: Path, monkeypatch, caplog_vllm, drafter: str, runner: str, size: int
):
    """On Runner V2 each rank can have a whole draft model; other drafters are split,
    and one log line says so."""
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", runner)
    spec = {"model": str(models / drafter), "draft_tensor_parallel_size": 1}
    config = engine_config(models / "target", spec, tensor_parallel_size=2)
    parallel = config.speculative_config.draft_parallel_config
    assert parallel.tensor_parallel_size == size
    assert ("split in 2, as the target is" in caplog_vllm.text) is (size == 2)


@pytest.mark.parametrize(
    "method, longest, asked, expected",
    [
        ("draft_model", 64, None, 64),
        ("draft_model", 128, None, None),
        ("eagle3", 64, None, None),
        ("eagle3", 64, 32, 32),
    ],
)
def test_context(method: str, longest: int, asked: int | None, expected: int | None):
    spec = unresolved("m", method=method, max_model_len=asked, num_speculative_tokens=8)
    spec.target_model_config = SimpleNamespace(max_model_len=128)
    spec.draft_model_config = SimpleNamespace(max_model_len=longest)
    context = find_context(spec)
    assert context == expected
    drafter = DrafterConfig(method, 8, context=context)
    # The engine may lower the target's max_model_len to fit its KV cache.
    assert [drafter.limit(128), drafter.limit(16)] == [expected or 128, 16]


# The resolved value.


def configured(models: Path, drafter: str, **settings: Any) -> SpeculativeConfig:
    spec = {"model": str(models / drafter), "num_speculative_tokens": 7} | settings
    return engine_config(models / "target", spec).speculative_config


def test_drafter_is_frozen_and_set_once(models: Path):
    """Also if the engine's config is created again, as workers do."""
    spec = {"model": str(models / "peagle"), "draft_tree": 31}
    config = engine_config(models / "target", spec)
    spec = config.speculative_config
    resolved = dict(vars(spec))
    with pytest.raises(FrozenInstanceError):
        spec.drafter.method = "eagle"
    assert replace(config).speculative_config is spec
    resolve_drafter(config)
    assert vars(spec) == resolved and spec.drafter is resolved["drafter"]
    assert pickle.loads(pickle.dumps(spec)).drafter == spec.drafter


@pytest.mark.parametrize(
    "name, settings, wanted",
    [
        ("draft", {"method": "draft_model"}, {"method": "draft_model"}),
        ("pard", {"draft_tree": 31}, {"num_nodes": 31, "parallel_width": 7}),
        ("pard", {"parallel_drafting_width": 4}, {"parallel_width": 4}),
        ("peagle", {"parallel_drafting": False}, {"parallel_width": 1}),
        ("eagle3", {}, {"method": "eagle3", "context": None}),
    ],
)
def test_bundled_drafters(models: Path, name: str, settings: dict, wanted: dict):
    """With a tree the engine verifies N drafts, and the drafter drafts K deep."""
    spec = configured(models, name, **settings)
    drafter = spec.drafter
    assert {key: getattr(drafter, key) for key in wanted} == wanted
    assert drafter.is_unified and drafter.why_not_unified is None
    assert drafter.num_speculative_tokens == 7
    num_verified = settings.get("draft_tree", 7)
    assert spec.num_speculative_tokens == drafter.num_verified == num_verified
    # The log has a short form of it, in one line.
    nodes = ", tree_nodes=31" if num_verified == 31 else ""
    model = str(models / name)
    assert repr(spec) == (
        f"SpeculativeConfig(method={spec.method!r}, {model=}, num_spec_tokens=7{nodes})"
    )


# Which speculator drafts.

PARD = DrafterConfig("draft_model", 7, is_parallel=True, parallel_width=7)
ADAPTIVE = {"enable_adaptive_verification": True}
SCHEDULE = {"num_speculative_tokens_per_batch_size": [(1, 8, 4)]}
BESIDE = "enable_adaptive_verification beside"


def ranks(**sizes: int) -> dict[str, Any]:
    each = {"decode_context_parallel_size": 1, "prefill_context_parallel_size": 1}
    each["data_parallel_size"] = 1
    return {"target_parallel_config": SimpleNamespace(**each | sizes)}


def dims(mrope: int) -> SimpleNamespace:
    """A model with M-RoPE positions of `mrope` dimensions; 0: plain positions."""
    return SimpleNamespace(uses_mrope=mrope > 0, mrope_num_dims=mrope)


@pytest.mark.parametrize(
    "reason, changes",
    [
        (None, {}),
        (None, {"target_model_config": dims(3)}),
        (None, {"draft_model_config": dims(3)}),
        (None, {"draft_model_config": dims(3), "target_model_config": dims(3)}),
        (
            "M-RoPE of 3 dimensions on a target of 4",
            {"draft_model_config": dims(3), "target_model_config": dims(4)},
        ),
        ("method ngram", {"method": "ngram"}),
        ("a drafter without a model config", {"draft_model_config": None}),
        (None, {"method": "draft_model", "use_heterogeneous_vocab": True}),
        (None, ADAPTIVE),
        (None, ADAPTIVE | {"draft_tree": 31}),
        (f"{BESIDE} data parallelism", ADAPTIVE | ranks(data_parallel_size=2)),
        (f"{BESIDE} a schedule of draft lengths", ADAPTIVE | SCHEDULE),
        ("decode context parallelism", ranks(decode_context_parallel_size=2)),
        ("prefill context parallelism", ranks(prefill_context_parallel_size=2)),
    ],
)
def test_find_unsupported(reason: str | None, changes: dict):
    head = {"method": "eagle3", "parallel_drafting": True}
    head |= {"draft_model_config": dims(0), "target_model_config": dims(0)}
    spec = unresolved("a/head", **head | ranks() | changes)
    assert find_unsupported(spec) == reason


@pytest.mark.parametrize(
    "spec, on_cpu, is_unified, refusal",
    [
        ({}, True, True, r"stages on a CPU \(2\)"),
        ({}, False, False, None),
        ({"method": "draft_model"}, False, True, None),
        ({"method": "draft_model"}, False, False, "vLLM's own speculators"),
        ({"parallel_drafting": True}, False, True, None),
        ({"parallel_drafting": True}, False, False, "vLLM's own speculators"),
        ({"draft_tree": 15}, False, True, "draft_tree"),
    ],
)
def test_pipeline_stages(spec, on_cpu, is_unified, refusal, monkeypatch):
    platform = SimpleNamespace(is_cpu=lambda: on_cpu)
    monkeypatch.setattr("vllm.config.drafter.target.current_platform", platform)
    config = SimpleNamespace(
        speculative_config=unresolved("a/head", **{"method": "eagle3"} | spec),
        parallel_config=SimpleNamespace(pipeline_parallel_size=2),
    )
    with pytest.raises(ValueError, match=refusal) if refusal else nullcontext():
        check_parallelism(config, is_unified)


@pytest.mark.parametrize(
    "method, is_v2, asked, unsupported, line",
    [
        ("draft_model", False, None, None, "to Runner V1, without the unified spec"),
        ("draft_model", False, "0", None, None),
        ("ngram", True, None, "method ngram", None),
        ("draft_model", True, None, "watermarking", "the unified one does not"),
        ("draft_model", False, None, "LoRA", "Runner V1: the unified one does not sup"),
    ],
)
def test_fallback_is_logged(
    monkeypatch, caplog_vllm, method, is_v2, asked, unsupported, line
):
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER")
    if asked is not None:
        monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", asked)
    logger = SimpleNamespace(warning_once=logging.getLogger("vllm").warning)
    monkeypatch.setattr("vllm.config.drafter.resolve.logger", logger)
    drafter = DrafterConfig(method, 7, unsupported=unsupported)
    log_who_drafts(SimpleNamespace(use_v2_model_runner=is_v2), drafter)
    assert len(caplog_vllm.messages) == (line is not None)
    assert all(line in each for each in caplog_vllm.messages)


@pytest.mark.parametrize("runner, is_unified", [("1", True), ("0", False)])
def test_unified_speculator_keeps_token_budget(models, monkeypatch, runner, is_unified):
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", runner)
    spec = {"model": str(models / "pard"), "num_speculative_tokens": 7}
    config = engine_config(models / "target", spec, max_num_batched_tokens=2048)
    assert config.speculative_config.drafter.is_unified is is_unified
    assert config.scheduler_config.max_num_scheduled_tokens == 2048
    slots = config.speculative_config.max_num_new_slots_for_drafting
    assert (slots == 0) is is_unified


NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}


@pytest.mark.skipif(not COMPILED, reason="kernels are not compiled for a CPU here")
@pytest.mark.parametrize("asked", [None, "0", "1"])
@pytest.mark.parametrize(
    "is_unified, spec",
    [(False, None), (False, NGRAM), (True, {"num_speculative_tokens": 7})],
    ids=["no speculation", "n-gram", "PARD"],
)
def test_cpu_uses_v2_for_unified_speculator(
    monkeypatch, models: Path, is_unified: bool, spec: dict | None, asked: str | None
):
    """Everything else runs as in vLLM, unless V2 is requested."""
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER")
    if asked is not None:
        monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", asked)
    spec = {"model": str(models / "pard")} | spec if is_unified else spec
    config = engine_config(models / "target", spec)
    runs_v2 = is_unified if asked is None else asked == "1"
    assert config.use_v2_model_runner is runs_v2
    if is_unified:
        assert config.speculative_config.drafter.is_unified is runs_v2
    assert not HAS_TRITON
