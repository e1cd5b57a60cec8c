# SPDX-License-Identifier: Apache-2.0
"""The family of every published drafter, and what follows from it."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.checkpoints.families import PUBLISHED
from vllm.config.draft_defaults import (
    fill_from_checkpoint,
    settle_layers,
    verify_drafting,
)
from vllm.config.draft_families import (
    FAMILIES,
    DraftFiles,
    as_the_base_reads_it,
    default_layers,
    find_family,
    tapped_layers,
)
from vllm.config.draft_settings import DraftSettings
from vllm.config.draft_vocab import why_different
from vllm.config.drafting import get_mask_token_id
from vllm.model_executor.models.interfaces import SupportsEagle3


class Settings(DraftSettings, SimpleNamespace):
    """A SpeculativeConfig as far as detection needs it."""


def settings(model: Path, **changes) -> Settings:
    values = {
        "model": str(model),
        "method": None,
        "revision": None,
        "parallel_drafting": None,
        "parallel_drafting_width": None,
        "num_speculative_tokens": None,
    }
    return Settings(**values | changes)


@pytest.fixture
def checkpoint(tmp_path: Path):
    """A folder that has a config, and the tensors' names in a header."""

    def make(config, tensors=()) -> Path:
        from safetensors.torch import save_file
        from torch import zeros

        (tmp_path / "config.json").write_text(json.dumps(config))
        save_file({n: zeros(1) for n in tensors}, tmp_path / "model.safetensors")
        return tmp_path

    return make


@pytest.mark.parametrize("name", PUBLISHED)
def test_published(name: str, checkpoint):
    made = PUBLISHED[name]
    config = json.loads(json.dumps(made.config))
    spec = settings(checkpoint(config, made.tensors(config)))
    fill_from_checkpoint(spec)
    assert spec.draft_family == made.family
    assert spec.method == made.method
    assert spec.parallel_drafting is (made.width > 1)
    assert spec.num_speculative_tokens == made.num_drafts
    assert spec.drafting_width == made.width
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
def test_other_models_are_left_to_the_base(config: dict):
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
    spec = settings(folder)
    fill_from_checkpoint(spec)
    assert (spec.draft_family, spec.method) == ("PARD-2", "draft_model")
    assert spec.parallel_drafting and spec.num_speculative_tokens == 15


@pytest.mark.parametrize(
    "config, method, wanted",
    [
        ({"pard_token": 5}, "eagle3", "draft_model"),
        ({"pard_token": 5}, "eagle", "draft_model"),
        ({"ptd_token_id": 5}, "draft_model", "eagle3"),
        ({"draft_vocab_size": 5}, "eagle", "eagle3"),
    ],
)
def test_contradictions_are_refused(config, method: str, wanted: str, checkpoint):
    with pytest.raises(ValueError, match=f'drafts with "{wanted}": unset method'):
        fill_from_checkpoint(settings(checkpoint(config), method=method))


@pytest.mark.parametrize("method", [None, "draft_model"])
def test_method_is_not_guessed_by_the_path(method: str | None, checkpoint):
    """The base takes a draft model in a folder named "eagle-3" for an EAGLE head."""
    spec = settings(checkpoint({"pard_token": 5}), method=method)
    fill_from_checkpoint(spec)
    spec.method = "eagle"
    assert spec.method == "draft_model"


def test_method_that_nothing_tells_is_the_bases_to_find(checkpoint):
    spec = settings(checkpoint({"model_type": "llama"}))
    fill_from_checkpoint(spec)
    spec.method = "eagle"
    assert spec.method == "eagle"


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
    made = as_the_base_reads_it(SimpleNamespace(**config))
    assert tapped_layers(made) == ids
    assert getattr(made, "num_aux_hidden_states", None) == (ids and len(ids))


@pytest.mark.parametrize("depth", [6, 8, 36])
def test_default_layers_are_those_that_the_base_taps(depth: int):
    target = SimpleNamespace(model=SimpleNamespace(layers=range(depth)))
    tapped = SupportsEagle3.get_eagle3_default_aux_hidden_state_layers(target)
    assert default_layers(depth) == tapped


@pytest.mark.parametrize("name", ["PEagleDraftModel", "LlamaForCausalLMPeagle"])
def test_a_parallel_head_is_told_by_its_architecture(name: str, checkpoint):
    """Its file may be pickled, so that no header names `mask_hidden`."""
    keys = {"architectures": [name], "draft_vocab_size": 9}
    assert find_family(DraftFiles(keys | {"mask_token_id": 5})).is_parallel
    assert find_family(DraftFiles(keys | {"ptd_token_id": 5})).name == "P-EAGLE, Amazon"
    spec = settings(checkpoint(keys))
    fill_from_checkpoint(spec)
    spec.draft_parallel_config = None
    config = SimpleNamespace(hf_config=SimpleNamespace(), get_vocab_size=lambda: 9)
    spec.draft_model_config = config
    with pytest.raises(ValueError, match=r"needs a mask token .* but .* names None"):
        verify_drafting(spec)


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
    spec = settings(checkpoint({}, names), draft_family=family)
    config = SimpleNamespace(num_hidden_layers=40)
    spec.draft_model_config = SimpleNamespace(
        hf_config=config, hf_text_config=config, get_model_arch_config=lambda: None
    )
    settle_layers(spec)
    assert config.num_hidden_layers == depth


@pytest.mark.parametrize(
    "name", ["LlamaEagle3DraftModel", "PEagleDraftModel", "LlamaForCausalLMPeagle"]
)
def test_architectures_that_the_base_does_not_know(name: str):
    config = SimpleNamespace(architectures=[name])
    assert as_the_base_reads_it(config).architectures == ["LlamaForCausalLMEagle3"]
    config = SimpleNamespace(architectures=["Qwen3ForCausalLM"])
    assert as_the_base_reads_it(config).architectures == ["Qwen3ForCausalLM"]


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
