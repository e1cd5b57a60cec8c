# SPDX-License-Identifier: Apache-2.0
"""Loading tensors of draft checkpoints into a model; none may be missing."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
import torch.nn as nn

from vllm.config.drafter import DrafterConfig
from vllm.model_executor.model_loader import draft_weights
from vllm.model_executor.model_loader.draft_weights import DraftWeights
from vllm.model_executor.models.utils import AutoWeightsLoader

VOCAB, HIDDEN = 6, 4


def parameter(*shape: int, dtype=torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.zeros(*shape, dtype=dtype), requires_grad=False)


class Model(nn.Module):
    """A draft model, or a head with a reduced or the full vocabulary."""

    packed_modules_mapping: ClassVar = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}

    def __init__(self, is_reduced: bool | None = None) -> None:
        super().__init__()
        self.put("model.embed_tokens.weight", VOCAB, HIDDEN)
        for layer in ("model.layers.0", "model.layers.1"):
            self.put(f"{layer}.qkv_proj.weight", 6, HIDDEN)
            self.put(f"{layer}.hidden_norm.weight", HIDDEN)
        if is_reduced is not None:
            self.put("lm_head.weight", 3 if is_reduced else VOCAB, HIDDEN)
            ids = parameter(3, dtype=torch.long) if is_reduced else None
            self.draft_id_to_target_id = ids

    def put(self, name: str, *shape: int) -> None:
        at, (*path, last) = self, name.split(".")
        for part in path:
            if not hasattr(at, part):
                at.add_module(part, nn.Module())
            at = getattr(at, part)
        at.register_parameter(last, parameter(*shape))

    def fill(self, weights) -> None:
        """Loads weights; shards of a packed weight go to their own rows."""
        parameters = dict(self.named_parameters())
        rows = {"q_proj": slice(0, 2), "k_proj": slice(2, 4), "v_proj": slice(4, 6)}
        for name, tensor in weights:
            name = name.replace("d2t", "draft_id_to_target_id")
            part = next((part for part in rows if part in name), None)
            name = name.replace(part, "qkv_proj") if part else name
            whole = parameters.get(name, parameters.get(f"model.{name}"))
            (whole.data[rows[part]] if part else whole.data).copy_(tensor)


def tensors(prefix: str = "model.") -> dict[str, torch.Tensor]:
    made = {f"{prefix}embed_tokens.weight": torch.ones(VOCAB, HIDDEN)}
    for layer in (0, 1):
        at = f"{prefix}layers.{layer}"
        made[f"{at}.hidden_norm.weight"] = torch.ones(HIDDEN)
        for part in "qkv":
            made[f"{at}.{part}_proj.weight"] = torch.ones(2, HIDDEN)
    return made


def head_tensors(reduced: bool) -> dict[str, torch.Tensor]:
    made = tensors("") | {"lm_head.weight": torch.ones(3 if reduced else VOCAB, HIDDEN)}
    return made | ({"d2t": torch.tensor([0, 1, 2])} if reduced else {})


@pytest.fixture
def load(monkeypatch) -> Callable[..., Model]:
    """Loads tensors into a model through `DraftWeights`."""

    def run(model: Model, given, method="eagle3", quantization=None, rows=None):
        drafter = DrafterConfig(method, 1, checkpoint_vocab_size=rows)
        spec = SimpleNamespace(method=method, drafter=drafter)
        monkeypatch.setattr(
            draft_weights,
            "get_current_vllm_config_or_none",
            lambda: SimpleNamespace(speculative_config=spec),
        )
        hf_config = SimpleNamespace(vocab_size=VOCAB)
        model_config = SimpleNamespace(
            model="a/drafter", hf_text_config=hf_config, quantization=quantization
        )
        weights = DraftWeights(model, model_config)
        with weights.checked():
            model.fill(weights.adapted(given.items()))
        return model

    return run


@pytest.mark.parametrize("name", tensors())
@pytest.mark.parametrize("quantization", [None, "fp8"])
def test_missing_tensor_of_a_draft_model_is_named(name: str, quantization, load):
    given, model = tensors(), Model()
    model.has_own_lm_head = False  # as in vLLM's Llama, which can be a target too
    for layer in model.model.layers.children():  # not every layer is quantized
        layer.qkv_proj.quant_method = type("UnquantizedLinearMethod", (), {})()
    load(model, given, "draft_model", quantization)
    del given[name]
    with pytest.raises(ValueError, match=f"a/drafter lacks {name}: the checkpoint"):
        load(model, given, "draft_model", quantization)


@pytest.mark.parametrize("reduced", [True, False])
@pytest.mark.parametrize("name", head_tensors(True))
def test_missing_tensor_of_a_head(name: str, reduced: bool, load):
    given = head_tensors(reduced)
    load(Model(reduced), given)
    if given.pop(name, None) is None:
        return
    is_shared = "embed_tokens" in name or (name == "lm_head.weight" and not reduced)
    if is_shared or name == "layers.1.hidden_norm.weight":
        load(Model(reduced), given)
        return
    with pytest.raises(ValueError, match=f"lacks {name}: the checkpoint"):
        load(Model(reduced), given)


@pytest.mark.parametrize("name", ["model.layers.1.gate", "extra.0", "lm_head.scale"])
def test_unexpected_tensor_is_named(name: str, load):
    """vLLM's loader raises; the error names the checkpoint and what to change."""

    class Loaded(Model):
        def fill(self, weights) -> None:
            AutoWeightsLoader(self).load_weights(weights)

    given = {f"{name}.weight": torch.ones(HIDDEN)}
    with pytest.raises(ValueError, match=f"a/drafter has a tensor {name}.weight, for"):
        load(Loaded(), given, "draft_model")


def test_other_methods_are_not_checked(load):
    load(Model(), {}, "medusa")


@pytest.mark.parametrize(
    "rename",
    [
        lambda name: name if name in ("lm_head.weight", "d2t") else f"model.{name}",
        lambda name: name.replace("layers.0.", "midlayer."),
        lambda name: name.replace("layers.", "midlayer."),
    ],
    ids=["nemo", "midlayer", "midlayer.0"],
)
def test_names_of_heads(rename: Callable[[str], str], load):
    given = {rename(name): tensor for name, tensor in head_tensors(True).items()}
    head = load(Model(True), given)
    assert all((p == 1).all() for n, p in head.named_parameters() if "weight" in n)
    assert head.draft_id_to_target_id.tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    "rows, dtype",
    [(VOCAB, torch.int32), (VOCAB, torch.int64), (VOCAB + 2, torch.int64)],
)
def test_d2t_of_full_vocabulary_is_ignored(rows: int, dtype: torch.dtype, load):
    """It maps each token to itself, and may have more rows than the target."""
    load(Model(False), head_tensors(False) | {"d2t": torch.zeros(rows, dtype=dtype)})


@pytest.mark.parametrize(
    "reduced, offsets",
    [(True, [0, 1, 9]), (True, [-1, 0, 0]), (False, [1, -1, 0, 0, 0, 0])],
)
def test_invalid_d2t_is_refused(reduced: bool, offsets: list[int], load):
    given = head_tensors(reduced) | {"d2t": torch.tensor(offsets)}
    with pytest.raises(ValueError, match="d2t of a/drafter names "):
        load(Model(reduced), given)


def test_duplicate_d2t_entries_warn(load, caplog_vllm):
    load(Model(True), head_tensors(True) | {"d2t": torch.tensor([1, 0, 0])})
    assert "names 1 of its tokens twice" in caplog_vllm.text


@pytest.mark.parametrize("own", [VOCAB - 2, VOCAB + 2])
def test_embeddings_get_as_many_rows_as_target(own: int, load):
    """Padding repeats the last row, so argmax, which takes the first, ignores it."""
    rows = torch.arange(own * HIDDEN, dtype=torch.float32).view(own, HIDDEN)
    given = tensors() | {"model.embed_tokens.weight": rows}
    model = load(Model(), given, "draft_model", rows=own)
    loaded = model.model.embed_tokens.weight
    common = min(own, VOCAB)
    assert torch.equal(loaded[:common], rows[:common])
    assert (loaded[common:] == rows[-1]).all()
