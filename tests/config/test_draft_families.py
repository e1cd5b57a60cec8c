# SPDX-License-Identifier: Apache-2.0
"""Detection of each published drafter's family, and the settings that follow."""

import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from tests.checkpoints.families import PUBLISHED, write_drafter, write_target
from vllm.config.drafter import FAMILIES, OWN_CHECKPOINTS, find_family
from vllm.config.drafter.files import default_layers, read_files
from vllm.config.drafter.target import correct_depth, why_different, without_media
from vllm.model_executor.models.interfaces import SupportsEagle3

from .specs import checkpoint, engine_config, unresolved

__all__ = ["checkpoint"]  # a fixture


@pytest.mark.parametrize("name", PUBLISHED)
def test_published(name: str, models, tmp_path):
    made, tokenizer = PUBLISHED[name], models / "target"
    target = write_target(made.target, tmp_path / "target", tokenizer, False)
    folder = write_drafter(name, tmp_path / "drafter", target)
    drafter = engine_config(target, {"model": str(folder)}).speculative_config.drafter
    assert (drafter.family, drafter.method) == (made.family, made.method)
    names = {"PARD": "pard", "PARD-2": "pard2"}  # in metrics
    assert drafter.mode == names.get(
        made.family, "peagle" if made.width > 1 else "eagle3"
    )
    assert drafter.num_speculative_tokens == made.num_drafts
    assert (drafter.parallel_width, drafter.mask_token_id) == (made.width, made.mask)
    features = drafter.target_features
    fed = features.layers if features else drafter.tapped_layers
    assert (fed or None) == made.layers


def test_every_family_is_published():
    tested = {made.family for made in PUBLISHED.values()}
    ours = {family.name for family in FAMILIES if family.method in OWN_CHECKPOINTS}
    assert tested == ours


PARD, SPECFORGE = {"pard_token": 5}, "P-EAGLE, SpecForge or verl-SpeCo"


def named(name: str, **keys) -> dict:
    return {"architectures": [name], **keys}


@pytest.mark.parametrize(
    "config, family",
    [
        ({"pard_token": 0, "spd_type": "pard"}, "PARD"),
        # A config key, or warp_model.bin, distinguishes PARD-2 from PARD.
        (PARD | {"spd_type": "pard2"}, "PARD-2"),
        (PARD | {"pard2": True}, "PARD-2"),
        (PARD | {"pard2_target_dim": 4096}, "PARD-2"),
        (PARD | {"pard2_target_dim": 0, "pard2_target_layers": []}, "PARD"),
        # Their weights may be pickled, without a header that lists `mask_hidden`.
        (named("PEagleDraftModel", mask_token_id=5), SPECFORGE),
        (named("LlamaForCausalLMPeagle", mask_token_id=5), SPECFORGE),
        (named("PEagleDraftModel", ptd_token_id=5), "P-EAGLE, Amazon"),
        ({"parallel_drafting": 1, "mask_token_id": 0}, "P-EAGLE, NeMo"),
        # Other models are left to vLLM, and so are empty values.
        (named("LlamaForCausalLM", model_type="llama"), None),
        (named("BertForMaskedLM", mask_token_id=103), None),
        ({"eagle_config": {}, "dflash_config": {}, "pard_token": None}, None),
        ({"eagle_config": None, "draft_vocab_size": 9}, "EAGLE-3, SafeAILab"),
        (named("Qwen3NextMTP", pard_token=5), "MTP"),
        (named("DFlashDraftModel", draft_vocab_size=9), "DFlash"),
        ({"dflash_config": {"causal": True}, "draft_vocab_size": 9}, "DFlash"),
        # DeepSpec's DFlash has DSpark's architecture, SpecForge's DSpark a DFlash key;
        # Muse Spark's names no architecture.
        (named("Qwen3DSparkModel", markov_rank=0), "DSpark"),
        (named("DSparkDraftModel", dflash_config={"causal": True}), "DSpark"),
        ({"model_type": "Muse_Spark_DSpark", "dflash_config": {"a": 1}}, "DSpark"),
    ],
)
def test_find_family(config: dict, family: str | None):
    found = find_family(config)
    assert (found and found.name) == family


@pytest.mark.parametrize(
    "config, method, used",
    [
        ({"pard_token": 5}, "eagle3", "draft_model"),
        ({"pard_token": 5}, "eagle", "draft_model"),
        ({"ptd_token_id": 5}, "draft_model", "eagle3"),
        ({"draft_vocab_size": 5}, "eagle", "eagle3"),
    ],
)
def test_checkpoint_overrides_method(
    config, method: str, used: str, checkpoint, caplog_vllm
):
    """vLLM itself runs an EAGLE-3 head with method "eagle", and one in a folder named
    "eagle3" with method "draft_model"."""
    spec = unresolved(checkpoint(config), method=method)
    assert read_files(spec) and spec.method == used
    (record,) = caplog_vllm.records
    assert f'drafts with "{used}"' in record.getMessage()
    assert record.getMessage().endswith("which is used: unset method.")


LANGUAGE_MODEL = ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")
EAGLE = ("embed_tokens.weight", "fc.weight", "layers.0.mlp.up_proj.weight")
EAGLE3 = ("fc.weight", "midlayer.hidden_norm.weight", "norm.weight", "lm_head.weight")
DFLASH = ("fc.weight", "hidden_norm.weight", "layers.0.mlp.up_proj.weight")


@pytest.mark.parametrize(
    "name, tensors, method",
    [
        ("eagle-draft", LANGUAGE_MODEL, "draft_model"),
        ("eagle3", EAGLE, "eagle"),
        ("draft", EAGLE, "eagle"),
        ("draft", EAGLE3, "eagle3"),
        ("draft", ("fc.weight", "layers.0.hidden_norm.weight"), "eagle3"),
        ("draft", DFLASH, "dflash"),
        ("eagle-draft", DFLASH, "dflash"),
        ("draft", (*DFLASH, "markov_head.markov_w1.weight"), "dspark"),
        ("draft", LANGUAGE_MODEL, None),  # vLLM checks whether it has MTP modules
    ],
)
@pytest.mark.parametrize("is_pickled", [False, True])
def test_method_from_tensor_names(
    name: str,
    tensors: tuple[str, ...],
    method: str | None,
    is_pickled: bool,
    checkpoint,
):
    """vLLM itself takes any model in a folder named "eagle-…" for an EAGLE head, and an
    EAGLE head in any other folder for a draft model."""
    folder = checkpoint({"model_type": "llama"}, tensors, name)
    if is_pickled:
        weights = load_file(file := folder / "model.safetensors")
        torch.save(weights, folder / "pytorch_model.bin")
        file.unlink()
    spec = unresolved(folder, num_speculative_tokens=4)
    found = read_files(spec)
    assert spec.method == method
    assert (found and found.method) == (method if method in OWN_CHECKPOINTS else None)


def test_method_from_path_if_no_file_decides(models, tmp_path):
    """Without readable tensor names, vLLM guesses the method of a language model."""
    shutil.copytree(models / "draft", folder := tmp_path / "eagle-8b")
    (folder / "model.safetensors").write_bytes(b"")
    spec = {"model": str(folder), "num_speculative_tokens": 4}
    made = engine_config(models / "target", spec, load_format="dummy")
    found = made.speculative_config
    assert found.method == found.drafter.method == "eagle"


DFLASH_KEYS = {"dflash_config": {"mask_token_id": 2, "target_layer_ids": [1, 3, 5]}}
XPRESS_KEYS = DFLASH_KEYS | {"xpress_block_size": 5}


@pytest.mark.parametrize(
    "architecture, keys, method, used",
    [
        ("DFlashDraftModel", DFLASH_KEYS, "dflash", "DFlashDraftModel"),
        ("Qwen3DFlash2DraftModel", DFLASH_KEYS, "dflash", "DFlash2DraftModel"),
        ("LiLiCorrDraftModel", DFLASH_KEYS, "dflash", "LiLiCorrDraftModel"),
        ("Qwen3XPressModel", XPRESS_KEYS, "dflash", "DFlashQwen3XPressModel"),
        ("DSparkDraftModel", DFLASH_KEYS, "dspark", "Qwen3DSparkModel"),
        ("Qwen3ForCausalLM", {}, "draft_model", "Qwen3ForCausalLM"),
        ("MiMoForCausalLM", {}, "draft_model", "MiMoForCausalLM"),
    ],
)
@pytest.mark.parametrize(
    "name, asked", [("eagle3-8b", None), ("dflash-8b", "draft_model")]
)
def test_method_from_files_not_path(
    architecture, keys, method, used, name, asked, models, checkpoint, monkeypatch
):
    """vLLM itself goes by words in the path, and takes a model that may have MTP
    layers for its MTP module."""
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    target = json.loads((models / "target" / "config.json").read_text())
    own = {"architectures": [architecture], "model_type": "qwen3", **keys}
    folder = checkpoint(target | own, LANGUAGE_MODEL, name)
    spec = {"model": str(folder), "num_speculative_tokens": 4, "method": asked}
    engine = engine_config(models / "target", spec, load_format="dummy")
    found = engine.speculative_config
    assert found.method == method
    assert found.draft_model_config.architectures == [used]


@pytest.mark.parametrize("name", ["target", "dflash-target", "my-eagle-8b"])
def test_method_mtp_does_not_depend_on_path(name: str, models, checkpoint):
    """Regression: vLLM itself takes the last two for other methods."""
    config = json.loads((models / "target" / "config.json").read_text())
    config |= {"architectures": ["MiMoForCausalLM"], "model_type": "qwen2"}
    target = checkpoint(config | {"num_nextn_predict_layers": 1}, name=name)
    spec = {"method": "mtp", "num_speculative_tokens": 1}
    engine = engine_config(target, spec, load_format="dummy")
    assert engine.speculative_config.method == "mtp"


@pytest.mark.parametrize("depth", [6, 8, 36])
def test_default_layers_match_vllm(depth: int):
    target = SimpleNamespace(model=SimpleNamespace(layers=range(depth)))
    tapped = SupportsEagle3.get_eagle3_default_aux_hidden_state_layers(target)
    assert default_layers(depth) == tapped


@pytest.mark.parametrize(
    "family, names, depth",
    [
        ("EAGLE-3, SafeAILab", (), 1),
        ("EAGLE-3, SafeAILab", ("midlayer.mlp.up_proj.weight",), 1),
        ("EAGLE-3, SafeAILab", ("layers.1.mlp.up_proj.weight",), 40),
        ("EAGLE-3, SpecForge or NVIDIA", (), 40),
    ],
)
def test_num_hidden_layers_of_heads_is_corrected(
    family: str, names: tuple[str, ...], depth: int, checkpoint
):
    spec = unresolved(checkpoint({}, names))
    config = SimpleNamespace(num_hidden_layers=40)
    spec.draft_model_config = SimpleNamespace(
        hf_config=config, hf_text_config=config, get_model_arch_config=lambda: None
    )
    correct_depth(spec, family)
    assert config.num_hidden_layers == depth


TOKENS = {"a": 0, "b": 1, "c": 2}


@pytest.mark.parametrize(
    "target, draft, num_common, reason",
    [
        (TOKENS, TOKENS, 3, None),
        (TOKENS, TOKENS | {"<mask>": 3}, 4, None),
        (TOKENS, {}, 3, "no tokenizer"),
        ({}, TOKENS, 3, "cannot be loaded"),
        (TOKENS, TOKENS, 2, "no row for some"),
        (TOKENS, {"a": 0, "b": 2, "c": 1}, 3, "its token 2, 'b'"),
        (TOKENS, {"a": 0, "b": 1, "d": 2}, 3, "its token 2, 'd'"),
        (TOKENS, TOKENS | {"a": 5}, 6, "its token 5, 'a'"),
    ],
)
def test_vocabularies(target: dict, draft: dict, num_common: int, reason: str | None):
    found = why_different(target, draft, num_common)
    assert found is None if reason is None else reason in found


@pytest.mark.parametrize("key", ["image_token_index", "video_token_id", "boi_token_id"])
def test_draft_model_needs_no_rows_for_media_tokens(key: str):
    """E.g. Gemma 3 1B, which has no row for the image placeholder token."""
    target = without_media(TOKENS | {"<image>": 3}, SimpleNamespace(**{key: 3}))
    assert why_different(target, TOKENS, 3) is None
    other = without_media(TOKENS | {"d": 3}, SimpleNamespace(eos_token_id=3))
    assert "no row for some" in why_different(other, TOKENS, 3)
