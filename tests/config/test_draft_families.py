# SPDX-License-Identifier: Apache-2.0
"""The family of every published drafter, and what follows from it."""

import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from tests.checkpoints.families import PUBLISHED
from vllm.config.drafter.checkpoint import get_mask_token_id
from vllm.config.drafter.families import (
    FAMILIES,
    DraftFiles,
    adapt_config,
    default_layers,
    find_family,
    tapped_layers,
    told_by_tensors,
)
from vllm.config.drafter.resolve import read_files
from vllm.config.drafter.target import correct_depth, find_mask_token
from vllm.config.drafter.vocabulary import why_different
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.models.interfaces import SupportsEagle3

from .specs import Checkpoint, checkpoint, unresolved

__all__ = ["checkpoint"]  # a fixture


@pytest.mark.parametrize("name", PUBLISHED)
def test_published(name: str, checkpoint: Checkpoint):
    made = PUBLISHED[name]
    config = json.loads(json.dumps(made.config))
    spec = unresolved(checkpoint(config, made.tensors(config)))
    drafter = read_files(spec)
    assert (drafter.family, drafter.method) == (made.family, made.method)
    assert spec.parallel_drafting is (made.width > 1)
    assert drafter.num_speculative_tokens == made.num_drafts
    if made.mask is not None:
        assert get_mask_token_id(config) == made.mask


def test_every_family_is_published():
    tested = {made.family for made in PUBLISHED.values()}
    assert tested == {family.name for family in FAMILIES}


@pytest.mark.parametrize(
    "config",
    [
        {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
        {"mask_token_id": 103, "architectures": ["BertForMaskedLM"]},
        {"architectures": ["DFlashDraftModel"], "draft_vocab_size": 9},
        {"dflash_config": {}, "mask_token_id": 3, "draft_vocab_size": 9},
        {"speculators_model_type": "dflash", "mask_token_id": 5},
        {"eagle_config": None, "pard_token": None},
    ],
)
def test_other_models_are_left_to_vllm(config: dict):
    assert find_family(DraftFiles(config)) is None


@pytest.mark.parametrize(
    "config, file",
    [
        ({"pard_token": 5, "spd_type": "pard2"}, None),
        ({"pard_token": 5, "pard2": True}, None),
        ({"pard_token": 5, "pard2_target_dim": 4096}, None),
        ({"pard_token": 5, "spd_type": "pard"}, "warp_model.bin"),
    ],
)
def test_pard2(config: dict, file: str | None, checkpoint):
    """Either its config or its file tells it from PARD."""
    folder = checkpoint(config)
    if file is not None:
        (folder / file).touch()
    drafter = read_files(spec := unresolved(folder))
    assert (drafter.family, drafter.method) == ("PARD-2", "draft_model")
    assert spec.parallel_drafting and drafter.num_speculative_tokens == 15


@pytest.mark.parametrize(
    "config, method, used",
    [
        ({"pard_token": 5}, "eagle3", "draft_model"),
        ({"pard_token": 5}, "eagle", "draft_model"),
        ({"ptd_token_id": 5}, "draft_model", "eagle3"),
        ({"draft_vocab_size": 5}, "eagle", "eagle3"),
    ],
)
def test_the_checkpoint_decides(
    config, method: str, used: str, checkpoint, caplog_vllm
):
    """vLLM runs an EAGLE-3 head that is called "eagle", and one in a folder named
    "eagle3" that is called "draft_model"."""
    spec = unresolved(checkpoint(config), method=method)
    assert read_files(spec).method == spec.method == used
    (record,) = caplog_vllm.records
    assert f'drafts with "{used}"' in record.getMessage()
    assert record.getMessage().endswith("which is used: unset method.")


LANGUAGE_MODEL = ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")
EAGLE = ("embed_tokens.weight", "fc.weight", "layers.0.mlp.up_proj.weight")
EAGLE3 = ("fc.weight", "midlayer.hidden_norm.weight", "norm.weight", "lm_head.weight")
DFLASH = ("fc.weight", "hidden_norm.weight", "layers.0.mlp.up_proj.weight")


@pytest.mark.parametrize(
    "tensors, method",
    [
        (LANGUAGE_MODEL, "draft_model"),
        (EAGLE, "eagle"),
        (("fc.bias", *EAGLE), "eagle"),
        (EAGLE3, "eagle3"),
        (("fc.weight", "layers.0.hidden_norm.weight"), "eagle3"),
        (DFLASH, None),
        ((), None),
    ],
)
@pytest.mark.parametrize("is_pickled", [False, True])
def test_tensors_tell_the_method(
    tensors: tuple[str, ...], method: str | None, is_pickled: bool, checkpoint
):
    """vLLM takes any model in a folder named "eagle-…" for an EAGLE head, and an EAGLE
    head in another one for a draft model."""
    for name in ("eagle-draft", "eagle3", "draft"):
        if name == "draft" and method == "draft_model":
            method = None  # vLLM tells whether it has MTP modules
        folder = checkpoint({"model_type": "llama"}, tensors, name)
        if is_pickled:
            weights = load_file(file := folder / "model.safetensors")
            torch.save(weights, folder / "pytorch_model.bin")
            file.unlink()
        spec = unresolved(folder, num_speculative_tokens=4)
        drafter = read_files(spec)
        assert spec.method == (drafter and drafter.method) == method


def test_tensors_of_other_methods_tell_nothing():
    files = DraftFiles({"dflash_config": {}}, lambda: EAGLE)
    assert told_by_tensors(files) is None


@pytest.mark.parametrize("name", ["draft", "eagle3"])
@pytest.mark.parametrize("method", [None, "draft_model"])
def test_words_of_a_path_do_not_count(name: str, method, models, tmp_path):
    """Neither for a language model nor for a head, and whatever the user says."""
    shutil.copytree(models / name, folder := tmp_path / "eagle-8b-eagle3")
    spec = {"model": str(folder), "method": method, "num_speculative_tokens": 4}
    engine = EngineArgs(
        model=str(models / "target"), dtype="float32", speculative_config=spec
    )
    found = engine.create_engine_config().speculative_config
    wanted = {"draft": "draft_model", "eagle3": "eagle3"}[name]
    assert found.method == found.drafter.method == wanted


def test_words_of_a_path_where_no_file_decides(models, tmp_path):
    """A language model that nothing tells of stays vLLM's to guess."""
    folder = tmp_path / "eagle-8b"
    shutil.copytree(models / "draft", folder)
    (folder / "model.safetensors").write_bytes(b"")
    engine = EngineArgs(
        model=str(models / "target"),
        dtype="float32",
        load_format="dummy",
        speculative_config={"model": str(folder), "num_speculative_tokens": 4},
    )
    assert engine.create_engine_config().speculative_config.method == "eagle"


@pytest.mark.parametrize(
    "config, ids",
    [
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, 5, 7]}, (1, 2, 5, 7)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [4, 5]}}, (4, 5)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": None}}, None),
        ({"eagle_aux_hidden_state_layer_ids": []}, None),
        ({"eagle_config": None}, None),
    ],
)
def test_tapped_layers(config: dict, ids: tuple[int, ...] | None):
    made = adapt_config(SimpleNamespace(**config))
    assert tapped_layers(made) == ids
    assert getattr(made, "num_aux_hidden_states", None) == (ids and len(ids))


@pytest.mark.parametrize("depth", [6, 8, 36])
def test_default_layers_are_those_that_vllm_taps(depth: int):
    target = SimpleNamespace(model=SimpleNamespace(layers=range(depth)))
    tapped = SupportsEagle3.get_eagle3_default_aux_hidden_state_layers(target)
    assert default_layers(depth) == tapped


@pytest.mark.parametrize("name", ["PEagleDraftModel", "LlamaForCausalLMPeagle"])
def test_a_parallel_head_is_told_by_its_architecture(name: str, checkpoint):
    """Its file may be pickled, so that no header names `mask_hidden`."""
    keys = {"architectures": [name], "draft_vocab_size": 9}
    assert find_family(DraftFiles(keys | {"mask_token_id": 5})).is_parallel
    assert find_family(DraftFiles(keys | {"ptd_token_id": 5})).name == "P-EAGLE, Amazon"
    spec = unresolved(checkpoint(keys))
    read_files(spec)
    config = SimpleNamespace(hf_config=SimpleNamespace(), get_vocab_size=lambda: 9)
    spec.draft_model_config = config
    with pytest.raises(ValueError, match=r"needs a mask token .* but .* names None"):
        find_mask_token(spec)


@pytest.mark.parametrize(
    "family, names, depth",
    [
        ("EAGLE-3, SafeAILab", (), 1),
        ("EAGLE-3, SafeAILab", ("midlayer.mlp.up_proj.weight",), 1),
        ("EAGLE-3, SafeAILab", ("layers.1.mlp.up_proj.weight",), 40),
        ("EAGLE-3, SpecForge or NVIDIA", (), 40),
    ],
)
def test_depth_of_heads_that_count_the_targets_layers(
    family: str, names: tuple[str, ...], depth: int, checkpoint
):
    spec = unresolved(checkpoint({}, names))
    config = SimpleNamespace(num_hidden_layers=40)
    spec.draft_model_config = SimpleNamespace(
        hf_config=config, hf_text_config=config, get_model_arch_config=lambda: None
    )
    correct_depth(spec, family)
    assert config.num_hidden_layers == depth


@pytest.mark.parametrize(
    "name", ["LlamaEagle3DraftModel", "PEagleDraftModel", "LlamaForCausalLMPeagle"]
)
def test_architectures_that_vllm_does_not_know(name: str):
    config = SimpleNamespace(architectures=[name])
    assert adapt_config(config).architectures == ["LlamaForCausalLMEagle3"]
    config = SimpleNamespace(architectures=["Qwen3ForCausalLM"])
    assert adapt_config(config).architectures == ["Qwen3ForCausalLM"]


TOKENS = {"a": 0, "b": 1, "c": 2}


@pytest.mark.parametrize(
    "draft, num_common, reason",
    [
        (TOKENS, 3, None),
        (TOKENS | {"<mask>": 3}, 4, None),
        ({}, 3, "no tokenizer"),
        (TOKENS, 2, "no row for some"),
        ({"a": 0, "b": 2, "c": 1}, 3, "its token 2, 'b'"),
        ({"a": 0, "b": 1, "d": 2}, 3, "its token 2, 'd'"),
        (TOKENS | {"a": 5}, 6, "its token 5, 'a'"),
    ],
)
def test_vocabularies(draft: dict, num_common: int, reason: str | None):
    found = why_different(TOKENS, draft, num_common)
    assert found is None if reason is None else reason in found


def test_a_target_that_nothing_is_known_of():
    assert "cannot be loaded" in why_different({}, TOKENS, 3)
