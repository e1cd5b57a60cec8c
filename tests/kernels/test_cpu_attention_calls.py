# SPDX-License-Identifier: Apache-2.0
"""Attention on a CPU is hidden in a custom op only from a compiler."""

from types import SimpleNamespace
from unittest.mock import Mock, patch

import pytest
import torch

from vllm.config import (
    CompilationConfig,
    CompilationMode,
    KVTransferConfig,
    ModelConfig,
    VllmConfig,
    set_current_vllm_config,
)
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention.attention import Attention
from vllm.platforms import current_platform

pytestmark = pytest.mark.skipif(not current_platform.is_cpu(), reason="needs a CPU")


@pytest.mark.parametrize("mode", CompilationMode)
def test_only_a_compiler_needs_the_op(mode: CompilationMode):
    config = VllmConfig(compilation_config=CompilationConfig(mode=mode))
    # The platform may have chosen another mode.
    mode = config.compilation_config.mode
    with set_current_vllm_config(config):
        is_opaque = current_platform.opaque_attention_op()
    assert is_opaque == (mode != CompilationMode.NONE)


def test_opaque_if_nothing_is_configured():
    assert current_platform.opaque_attention_op()


ROWS, HEADS, KV_HEADS, SIZE = 5, 4, 2, 32
QUERY = torch.randn(ROWS, HEADS * SIZE)
KEY, VALUE = torch.randn(2, ROWS, KV_HEADS * SIZE)
METADATA, SLOTS, CACHE = object(), torch.arange(ROWS), torch.zeros(1)


@pytest.fixture
def make_layer(models):
    def make(kind=Attention, mode=CompilationMode.NONE, **given) -> SimpleNamespace:
        config = VllmConfig(
            model_config=ModelConfig(str(models / "target"), dtype="float32"),
            compilation_config=CompilationConfig(mode=mode),
            **given,
        )
        with set_current_vllm_config(config):
            layer = kind(HEADS, SIZE, 0.1, num_kv_heads=KV_HEADS, prefix="layer")
            layer.kv_cache = CACHE
            layer.process_weights_after_loading(torch.float32)
        return SimpleNamespace(layer=layer, config=config)

    return make


def is_direct(layer: Attention) -> bool:
    return "forward" in vars(layer)


def calls(made: SimpleNamespace, forward, slots, *given, **more):
    """The result, and how the implementation was called."""
    impl = Mock(name="impl")

    def attend(layer, query, key, value, cache, metadata, output, **scales):
        assert not any(scales.values())
        impl.attend(layer, query.shape, key is None or key.shape, cache, metadata)
        output.copy_(query)

    def update(layer, key, value, cache, of_layer):
        impl.update(layer, key.shape, value.shape, cache, of_layer)

    impl_of_layer = made.layer.impl
    with (
        patch.object(impl_of_layer, "forward", attend),
        patch.object(impl_of_layer, "do_kv_cache_update", update),
        set_forward_context({"layer": METADATA}, made.config, slot_mapping=slots),
    ):
        found = forward(*given, **more)
    return found, impl.mock_calls


@pytest.mark.parametrize("slots", [{"layer": SLOTS}, {}], ids=["slots", "no slots"])
@pytest.mark.parametrize(
    "more",
    [{}, {"output_shape": torch.Size((ROWS, HEADS * SIZE))}],
    ids=["plain", "shaped"],
)
def test_direct_calls_are_the_usual_ones(make_layer, slots, more):
    made = make_layer()
    assert is_direct(made.layer)
    given = slots, QUERY, KEY, VALUE
    found, direct = calls(made, made.layer, *given, **more)
    wanted, usual = calls(made, lambda *a: Attention.forward(made.layer, *a), *given)
    assert direct == usual and len(usual) == 1 + bool(slots)
    assert torch.equal(found, wanted) and found.shape == wanted.shape


def test_without_keys_the_call_is_the_usual_one(make_layer):
    made = make_layer()
    _, direct = calls(made, made.layer, {"layer": SLOTS}, QUERY, None, None)
    assert [name for name, *_ in direct] == ["attend"]


class OtherLayer(Attention):
    def forward(self, *given):
        return super().forward(*given)


@pytest.mark.parametrize(
    "given",
    [
        {"kind": OtherLayer},
        {"mode": CompilationMode.DYNAMO_TRACE_ONCE},
        {
            "kv_transfer_config": KVTransferConfig(
                kv_connector="ExampleConnector", kv_role="kv_both"
            )
        },
    ],
    ids=["class", "compiled", "connector"],
)
def test_other_layers_are_called_as_usual(make_layer, given):
    assert not is_direct(make_layer(**given).layer)


def test_patched_layers_are_called_as_usual(make_layer, monkeypatch):
    monkeypatch.setattr(Attention, "forward", lambda *given: None)
    assert not is_direct(make_layer().layer)
