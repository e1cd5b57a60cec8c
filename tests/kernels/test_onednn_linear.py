# SPDX-License-Identifier: Apache-2.0
"""Linear layers that call oneDNN directly: the same results, and when they do not."""

import sys
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch

from vllm.config import CompilationConfig, VllmConfig, set_current_vllm_config
from vllm.config.compilation import CompilationMode
from vllm.distributed import parallel_state
from vllm.model_executor.layers.linear import (
    LinearBase,
    MergedColumnParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
    UnquantizedLinearMethod,
)
from vllm.platforms import current_platform

pytestmark = pytest.mark.skipif(not current_platform.is_cpu(), reason="needs a CPU")

SIZES = 64, 96


@pytest.fixture(autouse=True)
def one_rank(monkeypatch):
    alone = SimpleNamespace(world_size=1, rank_in_group=0)
    monkeypatch.setattr(parallel_state, "_TP", alone)


LAYERS = {
    "merged": lambda **given: MergedColumnParallelLinear(SIZES[0], [32, 64], **given),
    "replicated": lambda **given: ReplicatedLinear(*SIZES, **given),
    "row": lambda **given: RowParallelLinear(*SIZES, **given),
}


def packed(make=LAYERS["row"], mode=CompilationMode.NONE, **given) -> LinearBase:
    """A layer with random weights, as after loading."""
    config = VllmConfig(compilation_config=CompilationConfig(mode=mode))
    config.compilation_config.mode = mode  # the platform may have chosen another
    with set_current_vllm_config(config):
        layer = make(params_dtype=torch.float32, disable_tp=True, **given)
        fill(layer)
    return layer


def fill(layer: LinearBase) -> None:
    layer.weight = torch.nn.Parameter(torch.randn(*reversed(SIZES)), False)
    if layer.bias is not None:
        layer.bias.data = torch.randn_like(layer.bias)
    layer.quant_method.process_weights_after_loading(layer)


def is_direct(layer: LinearBase) -> bool:
    return "forward" in vars(layer)


@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("skip_bias_add", [False, True])
@pytest.mark.parametrize("return_bias", [False, True])
@pytest.mark.parametrize("shape", [(5,), (2, 3)], ids=str)
def test_equals_the_usual_call(make, bias, skip_bias_add, return_bias, shape):
    given = {"bias": bias, "skip_bias_add": skip_bias_add, "return_bias": return_bias}
    layer, x = packed(make, **given), torch.randn(*shape, SIZES[0])
    assert is_direct(layer)
    found, usual = layer(x), type(layer).forward(layer, x)
    if not return_bias:
        found, usual = (found, None), (usual, None)
    torch.testing.assert_close(found[0], usual[0], rtol=0, atol=0)
    assert found[1] is usual[1]


def test_takes_rows_that_are_apart():
    layer, x = packed(), torch.randn(5, 2 * SIZES[0])[:, : SIZES[0]]
    found, usual = layer(x)[0], type(layer).forward(layer, x.contiguous())[0]
    torch.testing.assert_close(found, usual, rtol=0, atol=0)


def test_weights_that_are_packed_anew_count():
    layer, x = packed(bias=True), torch.randn(5, SIZES[0])
    before = layer(x)[0]
    fill(layer)  # without an engine's config, so that it is called as usual
    assert not is_direct(layer)
    assert not torch.allclose(layer(x)[0], before)


def test_a_bias_that_is_replaced_counts():
    layer, x = packed(bias=True), torch.randn(5, SIZES[0])
    layer.bias = torch.nn.Parameter(torch.ones(SIZES[1]), False)
    usual = type(layer).forward(layer, x)[0]
    torch.testing.assert_close(layer(x)[0], usual, rtol=0, atol=0)


class OtherLayer(RowParallelLinear):
    def forward(self, input_):
        return super().forward(2 * input_)


class OtherMethod(UnquantizedLinearMethod):
    def apply(self, layer, x, bias=None):
        return 2 * super().apply(layer, x, bias)


def of_other_method(**given):
    layer = RowParallelLinear(*SIZES, **given)
    layer.quant_method = OtherMethod()
    return layer


def of_two_ranks(**given):
    layer = RowParallelLinear(*SIZES, **given)
    layer.tp_size = 2
    return layer


@pytest.mark.parametrize(
    "make",
    [
        lambda **given: OtherLayer(*SIZES, **given),
        of_other_method,
        of_two_ranks,
    ],
    ids=["class", "method", "ranks"],
)
def test_other_layers_are_called_as_usual(make):
    assert not is_direct(packed(make))


def test_compiled_layers_are_called_as_usual():
    assert not is_direct(packed(mode=CompilationMode.DYNAMO_TRACE_ONCE))


def test_patched_classes_are_called_as_usual():
    with patch.object(RowParallelLinear, "forward", lambda self, x: x):
        assert not is_direct(packed())
    with patch.object(UnquantizedLinearMethod, "apply", lambda *given: given[2]):
        assert not is_direct(packed())


def test_earlier_patches_are_seen(monkeypatch):
    """The module is imported when the first layer is packed."""
    name = "vllm.model_executor.layers.onednn_linear"
    monkeypatch.delitem(sys.modules, name, raising=False)
    with patch.object(RowParallelLinear, "forward", lambda self, x: x):
        assert not is_direct(packed())


def test_hooks_are_called():
    layer, seen = packed(), []
    layer.register_forward_hook(lambda module, args, output: seen.append(output))
    assert layer(torch.randn(5, SIZES[0])) is seen[0]
