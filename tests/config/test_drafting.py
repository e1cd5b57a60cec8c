# SPDX-License-Identifier: Apache-2.0
"""What a draft checkpoint says of itself, and what becomes of the settings."""

import json
from functools import reduce
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from vllm.config import SpeculativeConfig
from vllm.config.draft_defaults import fill_from_checkpoint, verify_drafting
from vllm.config.drafting import (
    draft_limit,
    get_mask_token_id,
    read_checkpoint,
    refuse_uncovered,
)

SPECULATORS = {"proposal_methods": [{"speculative_tokens": 8}]}


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
    assert not read_checkpoint(
        config, lambda: ["fc.weight", "mask_hidden.fc"]
    ).is_parallel


def test_tensors_are_not_asked_for_where_the_config_says_enough():
    def never() -> list[str]:
        raise AssertionError("a header was read for nothing")

    assert read_checkpoint({"pard_token": 3}, never).is_parallel
    assert not read_checkpoint({"model_type": "llama"}, never).is_parallel


@pytest.mark.parametrize("wrap", [dict, lambda **keys: SimpleNamespace(**keys)])
def test_mask_token_comes_from_the_first_key_set(wrap):
    assert get_mask_token_id(wrap(mask_token_id=1, pard_token=2, ptd_token_id=3)) == 1
    assert get_mask_token_id(wrap(mask_token_id=None, pard_token=2)) == 2
    assert get_mask_token_id(wrap(ptd_token_id=0)) == 0
    assert get_mask_token_id(wrap(vocab_size=9)) is None


@pytest.fixture
def checkpoint(tmp_path: Path):
    def make(**config) -> str:
        (tmp_path / "config.json").write_text(json.dumps(config))
        return str(tmp_path)

    return make


def settings(model: str, **changes) -> SimpleNamespace:
    """A SpeculativeConfig as far as defaults need it, before it is verified."""
    values = {
        "model": model,
        "method": "draft_model",
        "revision": None,
        "parallel_drafting": None,
        "parallel_drafting_width": None,
        "num_speculative_tokens": None,
        "target_parallel_config": None,
    }
    return SimpleNamespace(**values | changes)


@pytest.mark.parametrize("name", ["mask_hidden", "fc.weight"])
@pytest.mark.parametrize("is_on_hub", [False, True])
def test_mask_hidden_is_looked_for(
    checkpoint, tmp_path, monkeypatch, name: str, is_on_hub: bool
):
    model = checkpoint(model_type="llama", mask_token_id=3)
    save_file({name: torch.zeros(1, 4)}, tmp_path / "model.safetensors")
    if is_on_hub:
        model = cached(tmp_path, "someone/head", monkeypatch)
    spec = settings(model, method="eagle3", num_speculative_tokens=7)
    fill_from_checkpoint(spec)
    assert spec.parallel_drafting is (name == "mask_hidden")


def cached(checkpoint: Path, repo: str, monkeypatch) -> str:
    """Puts a checkpoint where an offline machine finds it by its id on the hub."""
    from huggingface_hub import constants

    cache, commit = checkpoint / "hub", "0" * 40
    home = cache / f"models--{repo.replace('/', '--')}"
    snapshot = home / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text(commit)
    for file in ("config.json", "model.safetensors"):
        (checkpoint / file).rename(snapshot / file)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return repo


def test_checkpoint_without_headers_says_how_to_draft_in_parallel(
    checkpoint, tmp_path, caplog_vllm
):
    (tmp_path / "pytorch_model.bin").touch()
    spec = settings(
        checkpoint(mask_token_id=3), method="eagle3", num_speculative_tokens=7
    )
    fill_from_checkpoint(spec)
    assert spec.parallel_drafting is False
    (record,) = caplog_vllm.records
    assert "unless parallel_drafting=true is set" in record.getMessage()


@pytest.mark.parametrize("is_pard", [True, False])
def test_unset_parallel_drafting_is_the_checkpoints(checkpoint, is_pard: bool):
    keys = {"pard_token": 4} if is_pard else {}
    spec = settings(checkpoint(model_type="llama", **keys), num_speculative_tokens=7)
    fill_from_checkpoint(spec)
    assert spec.parallel_drafting is is_pard


def test_number_of_drafts_is_what_was_trained_unless_set(checkpoint):
    model = checkpoint(model_type="llama", speculators_config=SPECULATORS)
    spec = settings(model)
    fill_from_checkpoint(spec)
    assert spec.num_speculative_tokens == 8
    spec = settings(model, num_speculative_tokens=3)
    fill_from_checkpoint(spec)
    assert spec.num_speculative_tokens == 3


def test_number_of_drafts_that_nothing_says_is_asked_for(checkpoint):
    with pytest.raises(ValueError, match=r'add\s+"num_speculative_tokens" to'):
        fill_from_checkpoint(settings(checkpoint(model_type="llama")))


def test_parallel_drafting_without_a_mask_token_is_refused(checkpoint):
    spec = settings(checkpoint(model_type="llama"), parallel_drafting=True)
    with pytest.raises(ValueError, match=r"Unset\s+parallel_drafting, or use a PARD"):
        fill_from_checkpoint(spec)


def test_autoregressive_use_of_a_parallel_drafter_warns_once(checkpoint, caplog_vllm):
    spec = settings(
        checkpoint(pard_token=4), parallel_drafting=False, num_speculative_tokens=7
    )
    fill_from_checkpoint(spec)
    assert spec.parallel_drafting is False
    (record,) = caplog_vllm.records
    assert "unset parallel_drafting" in record.getMessage()


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"parallel_drafting_width": 4}, "needs a drafter trained for parallel"),
        (
            {"parallel_drafting": True, "parallel_drafting_width": 9},
            r"parallel_drafting_width \(9\) must be at most",
        ),
        ({"parallel_drafting": True, "method": "eagle"}, 'method "eagle3"'),
    ],
)
def test_contradictions_are_refused(changes: dict, message: str):
    spec = settings("m", num_speculative_tokens=8, **changes)
    with pytest.raises(ValueError, match=message):
        verify_drafting(spec)


@pytest.mark.parametrize("mask", [None, -1, 100])
def test_mask_token_out_of_range_is_refused(mask: int | None):
    spec = settings("m", num_speculative_tokens=8, parallel_drafting=True)
    spec.draft_model_config = SimpleNamespace(
        hf_config=SimpleNamespace(pard_token=mask), get_vocab_size=lambda: 100
    )
    with pytest.raises(ValueError, match=r"its config names (None|-1|100): correct"):
        verify_drafting(spec)


def engine_config(**changes) -> SimpleNamespace:
    spec = {
        "method": "eagle3",
        "parallel_drafting": True,
        "parallel_drafting_width": None,
        "use_heterogeneous_vocab": False,
        "enable_adaptive_verification": False,
        "draft_model_config": SimpleNamespace(uses_mrope=False),
        "use_eagle": lambda: True,
    }
    return SimpleNamespace(
        speculative_config=SimpleNamespace(**spec | changes),
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=1, prefill_context_parallel_size=1
        ),
        model_config=None,
        use_v2_model_runner=True,
    )


# What the log says of a pair that is not covered: what to set in its config.
MULTIMODAL = SimpleNamespace(supports_multimodal_inputs=True)
UNCOVERED: dict[str, dict[str, Any]] = {
    "use_heterogeneous_vocab": {"speculative_config.use_heterogeneous_vocab": True},
    "enable_adaptive_verification": {
        "speculative_config.enable_adaptive_verification": True
    },
    "watermarking": {"watermark_config": object()},
    "decode context parallelism": {"parallel_config.decode_context_parallel_size": 2},
    "prefill context parallelism": {"parallel_config.prefill_context_parallel_size": 2},
    "a draft model with M-RoPE": {
        "speculative_config.draft_model_config.uses_mrope": True
    },
    "EAGLE on a multimodal target": {"model_config": MULTIMODAL},
}


def uncovered_config(reason: str, parallel: bool) -> SimpleNamespace:
    config = engine_config(parallel_drafting=parallel)
    for path, value in UNCOVERED[reason].items():
        *owners, name = path.split(".")
        setattr(reduce(getattr, owners, config), name, value)
    return config


@pytest.mark.parametrize("reason", UNCOVERED)
def test_parallel_drafting_that_is_not_covered_is_refused(monkeypatch, reason: str):
    """And only that: one token a pass is left to the base, or on request to V1."""
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
    refuse_uncovered(engine_config())
    refuse_uncovered(uncovered_config(reason, parallel=False))
    refused = uncovered_config(reason, parallel=True)
    with pytest.raises(ValueError, match=f"does not support {reason} on Model Runner"):
        refuse_uncovered(refused)
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    refuse_uncovered(refused)


def test_draft_models_on_a_multimodal_target_are_covered():
    config = engine_config(use_eagle=lambda: False)
    config.model_config = MULTIMODAL
    refuse_uncovered(config)


def test_width_needs_runner_v2():
    config = engine_config(parallel_drafting_width=4)
    config.use_v2_model_runner = False
    with pytest.raises(ValueError, match="needs Model Runner V2"):
        refuse_uncovered(config)


@pytest.mark.parametrize(
    "method, asked, expected",
    [("draft_model", None, 64), ("eagle3", None, 128), ("eagle3", 32, 32)],
)
def test_draft_limit(method: str, asked: int | None, expected: int):
    spec = SimpleNamespace(
        method=method,
        max_model_len=asked,
        draft_model_config=SimpleNamespace(max_model_len=64),
    )
    assert draft_limit(spec, 128) == expected


@pytest.mark.parametrize("method, refused", [("draft_model", True), ("eagle3", False)])
def test_draft_model_shares_the_targets_parallelism(method: str, refused: bool):
    spec = settings("m", num_speculative_tokens=8, method=method)
    spec.draft_tensor_parallel_size = 1
    spec.target_parallel_config = SimpleNamespace(tensor_parallel_size=2)
    if not refused:
        return verify_drafting(spec)
    with pytest.raises(ValueError, match=r"leave it unset"):
        verify_drafting(spec)


@pytest.mark.parametrize(
    "parallel, width, expected", [(False, None, 1), (True, None, 8), (True, 4, 4)]
)
def test_drafting_width(parallel: bool, width: int | None, expected: int):
    spec = settings("m", num_speculative_tokens=8)
    spec.parallel_drafting, spec.parallel_drafting_width = parallel, width
    assert SpeculativeConfig.drafting_width.fget(spec) == expected


def test_unknown_keys_are_still_refused():
    with pytest.raises(ValueError, match="no_such_key"):
        SpeculativeConfig(method="ngram", num_speculative_tokens=2, no_such_key=1)


def test_other_methods_are_left_alone():
    spec = SpeculativeConfig(method="ngram", num_speculative_tokens=2)
    assert spec.parallel_drafting is False
    assert spec.max_num_new_slots_for_drafting == 0
