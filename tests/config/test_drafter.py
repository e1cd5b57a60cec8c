# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint and the settings come to: `speculative_config.drafter`."""

import logging
import pickle
from collections.abc import Callable
from dataclasses import FrozenInstanceError, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vllm.config import SpeculativeConfig
from vllm.config.drafter import DrafterConfig
from vllm.config.drafter.checkpoint import get_mask_token_id, read_checkpoint
from vllm.config.drafter.engine import (
    check_needs_unified,
    find_unsupported,
    settle_drafter,
)
from vllm.config.drafter.resolve import read_files
from vllm.config.drafter.settings import check_tree, check_width
from vllm.config.drafter.target import find_context, find_mask_token
from vllm.engine.arg_utils import EngineArgs

from .specs import Checkpoint, cached, checkpoint, unresolved, with_models

__all__ = ["checkpoint"]  # a fixture
SPECULATORS = {"proposal_methods": [{"speculative_tokens": 8}]}
LLAMA = {"model_type": "llama"}

# What a checkpoint says.


@pytest.mark.parametrize(
    "config, expected",
    [
        ({"architectures": ["LlamaForCausalLM"]}, (None, False, None)),
        ({"pard_token": 128020, "spd_type": "pard"}, (128020, True, None)),
        ({"ptd_token_id": 201020}, (201020, True, None)),
        (
            {"parallel_drafting": True, "mask_token_id": 7, "num_depths": 6},
            (7, True, 6),
        ),
        (
            {
                "speculators_model_type": "peagle",
                "mask_token_id": 5,
                "speculators_config": SPECULATORS,
            },
            (5, True, 8),
        ),
        (
            {"speculators_model_type": "eagle3", "speculators_config": SPECULATORS},
            (None, False, 8),
        ),
        # A masked language model names a mask token too; it drafts nothing.
        ({"mask_token_id": 103}, (103, False, None)),
        ({"mask_token_id": None, "pard_token": 0}, (0, True, None)),
        ({"pard_token": "<mask>", "speculators_config": [1]}, ("<mask>", True, None)),
    ],
)
def test_read_checkpoint(config: dict, expected: tuple):
    found = read_checkpoint(config)
    read = found.mask_token_id, found.is_parallel, found.num_speculative_tokens
    assert read == expected


@pytest.mark.parametrize("name", ["mask_hidden", "model.mask_hidden"])
def test_mask_hidden_makes_a_mask_token_parallel(name: str):
    config = {"mask_token_id": 3}
    assert read_checkpoint(config, lambda: ["fc.weight", name]).is_parallel
    other = ["fc.weight", "mask_hidden.fc"]
    assert not read_checkpoint(config, lambda: other).is_parallel


def test_tensors_are_not_asked_for_where_the_config_says_enough():
    def never() -> list[str]:
        raise AssertionError("a header was read for nothing")

    assert read_checkpoint({"pard_token": 3}, never, is_unclear=True).is_parallel
    assert not read_checkpoint(LLAMA, never).is_parallel


@pytest.mark.parametrize("wrap", [dict, lambda **keys: SimpleNamespace(**keys)])
def test_mask_token_comes_from_the_first_key_set(wrap):
    assert get_mask_token_id(wrap(mask_token_id=1, pard_token=2, ptd_token_id=3)) == 1
    assert get_mask_token_id(wrap(mask_token_id=None, pard_token=2)) == 2
    assert get_mask_token_id(wrap(ptd_token_id=0)) == 0
    assert get_mask_token_id(wrap(vocab_size=9)) is None


# What is filled in.


@pytest.mark.parametrize("name", ["mask_hidden", "fc.weight"])
@pytest.mark.parametrize("is_on_hub", [False, True])
def test_mask_hidden_is_looked_for(
    checkpoint: Checkpoint, monkeypatch, name: str, is_on_hub: bool
):
    folder = checkpoint(LLAMA | {"mask_token_id": 3}, [name])
    model = cached(folder, "someone/head", monkeypatch) if is_on_hub else folder
    spec = unresolved(model, method="eagle3", num_speculative_tokens=7)
    read_files(spec)
    assert spec.parallel_drafting is (name == "mask_hidden")


def test_checkpoint_without_names_says_what_to_set(checkpoint: Checkpoint, caplog_vllm):
    folder = checkpoint({"mask_token_id": 3})
    spec = unresolved(folder, method="eagle3", num_speculative_tokens=7)
    read_files(spec)
    assert spec.parallel_drafting is False
    (record,) = caplog_vllm.records
    assert "set method and parallel_drafting" in record.getMessage()


@pytest.mark.parametrize("is_pard", [True, False])
def test_unset_parallel_drafting_is_the_checkpoints(checkpoint, is_pard: bool):
    folder = checkpoint(LLAMA | ({"pard_token": 4} if is_pard else {}))
    spec = unresolved(folder, method="draft_model", num_speculative_tokens=7)
    read_files(spec)
    assert spec.parallel_drafting is is_pard


@pytest.mark.parametrize("given, expected", [(None, 8), (3, 3)])
def test_number_of_drafts_is_what_was_trained_unless_set(checkpoint, given, expected):
    folder = checkpoint(LLAMA | {"speculators_config": SPECULATORS})
    spec = unresolved(folder, method="draft_model", num_speculative_tokens=given)
    read_files(spec)
    assert spec.num_speculative_tokens == expected


def test_number_of_drafts_that_nothing_says_is_at_most_seven(checkpoint: Checkpoint):
    spec = unresolved(checkpoint(LLAMA), method="draft_model")
    read_files(spec)
    assert spec.num_speculative_tokens == 7


@pytest.mark.parametrize(
    "given, is_auto",
    [
        ({}, True),
        ({"num_speculative_tokens": 3}, False),
        ({"num_speculative_tokens_per_batch_size": [(1, 8, 3)]}, False),
        ({"draft_tree": 31}, False),
        ({"method": "mtp"}, False),
    ],
)
def test_draft_length_is_chosen_unless_set(checkpoint, given: dict, is_auto: bool):
    folder = checkpoint(LLAMA | {"speculators_config": SPECULATORS})
    spec = unresolved(folder, **{"method": "draft_model"} | given)
    read_files(spec)
    schedule = spec.num_speculative_tokens_per_batch_size
    assert (schedule == "auto") == spec.is_auto_by_default == is_auto
    if not is_auto:
        assert schedule == given.get("num_speculative_tokens_per_batch_size")


def test_parallel_drafting_without_a_mask_token_is_refused(checkpoint: Checkpoint):
    spec = unresolved(checkpoint(LLAMA), method="draft_model", parallel_drafting=True)
    with pytest.raises(ValueError, match=r"Unset\s+parallel_drafting, or use a PARD"):
        read_files(spec)


def test_autoregressive_use_of_a_parallel_drafter_warns_once(checkpoint, caplog_vllm):
    folder = checkpoint({"pard_token": 4})
    read_files(unresolved(folder, parallel_drafting=False, num_speculative_tokens=7))
    (record,) = caplog_vllm.records
    assert "unset parallel_drafting" in record.getMessage()


@pytest.mark.parametrize(
    "method, size, used",
    [("draft_model", 2, None), ("draft_model", 1, 1), ("eagle3", 2, 1)],
)
def test_draft_models_are_split_as_the_target(
    checkpoint, caplog_vllm, method: str, size: int, used: int | None
):
    """Unset, their size is the target's."""
    spec = unresolved(
        checkpoint(LLAMA),
        method=method,
        num_speculative_tokens=7,
        draft_tensor_parallel_size=1,
        target_parallel_config=SimpleNamespace(tensor_parallel_size=size),
    )
    read_files(spec)
    assert spec.draft_tensor_parallel_size == used
    assert ("split in 2, as the target is" in caplog_vllm.text) is (used is None)


# What is refused once all is filled in.


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"parallel_drafting_width": 4}, "needs a drafter trained for parallel"),
        (
            {"parallel_drafting": True, "parallel_drafting_width": 9},
            r"parallel_drafting_width \(9\) must be at most",
        ),
    ],
)
def test_widths_that_do_not_fit_are_refused(changes: dict, message: str):
    spec = unresolved("m", method="eagle3", num_speculative_tokens=8, **changes)
    with pytest.raises(ValueError, match=message):
        check_width(spec)


@pytest.mark.parametrize("mask", [None, -1, 100, "<mask>", [2], True])
def test_mask_token_out_of_range_is_refused(mask: Any):
    spec = unresolved("m", method="draft_model", parallel_drafting=True)
    spec.draft_model_config = SimpleNamespace(
        hf_config=SimpleNamespace(pard_token=mask), get_vocab_size=lambda: 100
    )
    with pytest.raises(ValueError, match=r"its config names .*: correct"):
        find_mask_token(spec)
    spec.parallel_drafting = False
    assert find_mask_token(spec) is None


@pytest.mark.parametrize(
    "method, asked, expected",
    [("draft_model", None, 64), ("eagle3", None, None), ("eagle3", 32, 32)],
)
def test_context(method: str, asked: int | None, expected: int | None):
    spec = unresolved("m", method=method, max_model_len=asked, num_speculative_tokens=8)
    spec.target_model_config = SimpleNamespace(max_model_len=128)
    spec.draft_model_config = SimpleNamespace(max_model_len=64)
    context = find_context(spec)
    assert context == expected
    drafter = DrafterConfig(method, 8, context=context)
    # The engine may lower the target's to fit its KV cache.
    assert [drafter.limit(128), drafter.limit(16)] == [expected or 128, 16]


# The value.


def test_it_cannot_be_changed_and_can_be_sent(models: Path):
    spec = configured(models, "peagle")
    with pytest.raises(FrozenInstanceError):
        spec.drafter.method = "eagle"
    assert pickle.loads(pickle.dumps(spec)).drafter == spec.drafter


@pytest.mark.parametrize(
    "method, parallel, family, mode",
    [
        ("draft_model", False, None, "draft_model"),
        ("draft_model", True, None, "pard"),
        ("draft_model", True, "PARD", "pard"),
        ("draft_model", True, "PARD-2", "pard2"),
        ("eagle", False, None, "eagle"),
        ("eagle3", False, "EAGLE-3, SafeAILab", "eagle3"),
        ("eagle3", True, "P-EAGLE, Amazon", "peagle"),
        ("ngram", False, None, "ngram"),
        ("dflash", True, None, "dflash"),
    ],
)
def test_mode(method: str, parallel: bool, family: str | None, mode: str):
    drafter = DrafterConfig(method, 4, family=family, is_parallel=parallel)
    assert drafter.mode == mode


def test_unknown_keys_are_still_refused():
    with pytest.raises(ValueError, match="no_such_key"):
        SpeculativeConfig(method="ngram", num_speculative_tokens=2, no_such_key=1)


def test_other_methods_are_left_alone():
    spec = SpeculativeConfig(method="ngram", num_speculative_tokens=2)
    assert spec.parallel_drafting is False
    assert spec.max_num_new_slots_for_drafting == 0
    assert spec.drafter.why_not_unified == "method ngram"


@pytest.fixture(autouse=True)
def runner(monkeypatch) -> None:
    """Runner V2, as on a GPU."""
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")


def configured(models: Path, drafter: str, **settings: Any) -> SpeculativeConfig:
    spec = {"model": str(models / drafter), "num_speculative_tokens": 7} | settings
    engine = EngineArgs(
        model=str(models / "target"),
        dtype="float32",
        enforce_eager=True,
        speculative_config=spec,
    )
    return engine.create_engine_config().speculative_config


@pytest.mark.parametrize(
    "name, settings, wanted",
    [
        ("draft", {"method": "draft_model"}, {"method": "draft_model"}),
        (
            "pard",
            {},
            {"method": "draft_model", "family": "PARD", "parallel_width": 7},
        ),
        ("pard", {"parallel_drafting_width": 4}, {"parallel_width": 4}),
        ("peagle", {}, {"method": "eagle3", "parallel_width": 7, "context": None}),
        ("peagle", {"parallel_drafting": False}, {"parallel_width": 1}),
        ("eagle3", {}, {"method": "eagle3", "mask_token_id": None}),
    ],
)
def test_of_bundled_drafters(models: Path, name: str, settings: dict, wanted: dict):
    drafter = configured(models, name, **settings).drafter
    assert {key: getattr(drafter, key) for key in wanted} == wanted
    assert drafter.is_unified and drafter.why_not_unified is None
    assert drafter.num_verified == drafter.num_speculative_tokens == 7


def test_the_log_has_one_short_line_of_it(models: Path):
    spec = configured(models, "pard")
    model = str(models / "pard")
    assert (
        repr(spec)
        == f"SpeculativeConfig(method='draft_model', {model=}, num_spec_tokens=7)"
    )


# Trees.


def test_tree(models: Path):
    """The engine verifies N drafts; the drafter goes K deep."""
    spec = configured(models, "pard", draft_tree=31)
    assert spec.num_speculative_tokens == spec.drafter.num_verified == 31
    drafter = spec.drafter
    assert (drafter.num_speculative_tokens, drafter.num_nodes) == (7, 31)
    assert drafter.parallel_width == 7


TREE = DrafterConfig("draft_model", 7, is_parallel=True, parallel_width=7)


@pytest.mark.parametrize(
    "drafter, settings, message",
    [
        (TREE, {"draft_tree": 7}, None),
        (TREE, {"draft_tree": 127}, None),
        (TREE, {"draft_tree": 6}, r"\(6\) must be from num_speculative_tokens \(7\)"),
        (TREE, {"draft_tree": 128}, "to 127: change one"),
        (
            replace(TREE, is_parallel=False, parallel_width=1),
            {"draft_tree": 31},
            "in one pass: use a PARD",
        ),
        (DrafterConfig("ngram", 7), {"draft_tree": 31}, "in one pass: use a PARD"),
        (
            replace(TREE, parallel_width=4),
            {"draft_tree": 31},
            "needs all 7 tokens drafted in one pass, not 4: unset it, or parallel_draf",
        ),
        (
            TREE,
            {"draft_tree": 31, "draft_sample_method": "probabilistic"},
            'not support draft_sample_method="probabilistic": leave it unset',
        ),
        (
            TREE,
            {"draft_tree": 31, "rejection_sample_method": "block"},
            'not support rejection_sample_method="block": leave it unset',
        ),
    ],
)
def test_trees_that_cannot_be(
    drafter: DrafterConfig, settings: dict, message: str | None
):
    spec = unresolved("m", **settings)
    if message is None:
        return check_tree(spec, drafter)
    with pytest.raises(ValueError, match=message):
        check_tree(spec, drafter)


# Who drafts.

MULTIMODAL = SimpleNamespace(supports_multimodal_inputs=True)
PARALLEL = {"decode_context_parallel_size": 1, "prefill_context_parallel_size": 1}
UNSUPPORTED: dict[str, dict[str, Any]] = {
    "method ngram": {"method": "ngram"},
    "a drafter without a model config": {"draft_model_config": None},
    "use_heterogeneous_vocab": {"use_heterogeneous_vocab": True},
    "enable_adaptive_verification": {"enable_adaptive_verification": True},
    "decode context parallelism": {
        "target_parallel_config": SimpleNamespace(
            **PARALLEL | {"decode_context_parallel_size": 2}
        )
    },
    "prefill context parallelism": {
        "target_parallel_config": SimpleNamespace(
            **PARALLEL | {"prefill_context_parallel_size": 2}
        )
    },
    "a draft model with M-RoPE": {"draft_model_config": SimpleNamespace(uses_mrope=1)},
    "EAGLE on a multimodal target": {"target_model_config": MULTIMODAL},
}


@pytest.mark.parametrize("reason", UNSUPPORTED)
def test_what_the_unified_speculator_does_not_support(reason: str):
    assert find_unsupported(with_models()) is None
    assert find_unsupported(with_models(**UNSUPPORTED[reason])) == reason


def test_draft_models_on_a_multimodal_target_are_supported():
    spec = with_models(method="draft_model", target_model_config=MULTIMODAL)
    assert find_unsupported(spec) is None


@pytest.mark.parametrize(
    "settings, name",
    [
        ({"num_speculative_tokens_per_batch_size": "auto"}, "num_speculative.*auto"),
        ({"parallel_drafting_width": 4}, "parallel_drafting_width"),
        ({"draft_tree": 31}, "draft_tree"),
    ],
)
@pytest.mark.parametrize("unsupported", [None, "watermarking"])
def test_settings_that_need_it(settings: dict, name: str, unsupported: str | None):
    spec, drafter = unresolved("m", **settings), replace(TREE, unsupported=unsupported)
    check_needs_unified(spec, replace(drafter, is_unified=True))
    why = unsupported or "Model Runner V1"
    with pytest.raises(ValueError, match=f"{name}.* does not support {why}.*turn that"):
        check_needs_unified(spec, drafter)


def engine(drafter: DrafterConfig, is_v2: bool, **config: Any) -> SimpleNamespace:
    """An engine's config, as much of it as tells who drafts."""
    spec = unresolved("m", method=drafter.method)
    spec.drafter = drafter
    return SimpleNamespace(
        speculative_config=spec,
        parallel_config=SimpleNamespace(pipeline_parallel_size=1),
        scheduler_config=SimpleNamespace(
            max_num_scheduled_tokens=None, max_num_batched_tokens=512
        ),
        use_v2_model_runner=is_v2,
        **config,
    )


@pytest.fixture
def fallback_lines(monkeypatch, caplog_vllm) -> Callable[[SimpleNamespace], list[str]]:
    """The log's lines on who drafts instead of the unified speculator."""
    monkeypatch.setattr("vllm.config.drafter.engine.check_weights", lambda _: None)
    logger = SimpleNamespace(warning_once=logging.getLogger("vllm").warning)
    monkeypatch.setattr("vllm.config.drafter.engine.logger", logger)

    def run(config: SimpleNamespace) -> list[str]:
        assert settle_drafter(config) is config.speculative_config.drafter.is_unified
        return [record.getMessage() for record in caplog_vllm.records]

    return run


@pytest.mark.parametrize(
    "drafter, is_v2, asked, line",
    [
        (TREE, True, None, None),
        (TREE, False, None, "back to Runner V1, without the unified speculator"),
        (TREE, False, "0", None),
        (DrafterConfig("ngram", 4, unsupported="method ngram"), True, None, None),
        (
            replace(TREE, unsupported="watermarking"),
            True,
            None,
            "back to vLLM's own speculator: the unified one does not support waterm",
        ),
        (
            replace(TREE, unsupported="watermarking"),
            False,
            None,
            "deprecated Runner V1: the unified speculator does not support watermar",
        ),
    ],
)
def test_a_fallback_is_told(fallback_lines, monkeypatch, drafter, is_v2, asked, line):
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER")
    if asked is not None:
        monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", asked)
    config = engine(drafter, is_v2)
    lines = fallback_lines(config)
    assert len(lines) == (line is not None) and all(line in said for said in lines)
    is_unified = drafter.unsupported is None and is_v2
    assert config.speculative_config.drafter.is_unified is is_unified
    budget = config.scheduler_config.max_num_scheduled_tokens
    assert budget == (512 if is_unified else None)


def test_a_watermark_is_known_to_the_engine_alone(fallback_lines):
    config = engine(TREE, True, watermark_config=object())
    assert "does not support watermarking." in fallback_lines(config)[0]
