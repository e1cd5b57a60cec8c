# SPDX-License-Identifier: Apache-2.0
"""Rotary embeddings and SiLU that are called directly: the same results, and when."""

import pytest
import torch

from vllm.config import CompilationConfig, VllmConfig, set_current_vllm_config
from vllm.config.compilation import CompilationMode
from vllm.model_executor.layers import direct_ops
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.platforms import current_platform

pytestmark = pytest.mark.skipif(not current_platform.is_cpu(), reason="needs a CPU")

TOKENS, HEADS, SIZE = 7, 3, 32


class OtherSilu(SiluAndMul):
    def forward_cpu(self, x: torch.Tensor) -> torch.Tensor:
        return x[..., : x.shape[-1] // 2]


class OtherRotary(RotaryEmbedding):
    def forward_cpu(self, positions, query, key=None):
        return query, key


def rotary(is_neox_style: bool = True, kind=RotaryEmbedding) -> RotaryEmbedding:
    return kind(SIZE, SIZE, 64, 10000.0, is_neox_style, torch.float32)


def made(make, mode=CompilationMode.NONE) -> torch.nn.Module:
    config = VllmConfig(compilation_config=CompilationConfig(mode=mode))
    config.compilation_config.mode = mode  # the platform may have chosen another
    with set_current_vllm_config(config):
        return make()


def is_direct(op: torch.nn.Module) -> bool:
    return op._forward_method.__module__ == direct_ops.__name__


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(1, 32), (64, 768), (2, 3, 16)], ids=str)
def test_silu_equals_the_usual_call(dtype: torch.dtype, shape: tuple[int, ...]):
    torch.manual_seed(0)
    silu, x = made(SiluAndMul), torch.randn(shape).to(dtype)
    kept = x.clone()
    assert is_direct(silu)
    assert torch.equal(silu(x), silu.forward_native(x))
    assert torch.equal(x, kept)


@pytest.mark.parametrize("is_neox_style", [False, True])
@pytest.mark.parametrize("has_key", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("by_head", [False, True])
def test_rotation_equals_the_usual_call(is_neox_style, has_key, dtype, by_head):
    torch.manual_seed(0)
    op = made(lambda: rotary(is_neox_style))
    assert is_direct(op)
    shape = (TOKENS, HEADS, SIZE) if by_head else (TOKENS, HEADS * SIZE)
    positions = torch.randint(64, (TOKENS,))
    query, key = torch.randn(2, *shape).to(dtype)
    given = [query, key if has_key else None]
    copies = [x if x is None else x.clone() for x in given]
    for one, other in zip(
        op(positions, *given), op.forward_cpu(positions, *copies), strict=True
    ):
        assert one is other is None or torch.equal(one, other)


def test_replaced_cache_is_used():
    op = made(rotary)
    op.cos_sin_cache = torch.zeros_like(op.cos_sin_cache)
    query, _ = op(torch.arange(TOKENS), torch.ones(TOKENS, SIZE))
    assert not query.any()


@pytest.mark.parametrize("make", [OtherSilu, lambda: rotary(kind=OtherRotary)])
def test_subclasses_keep_their_own(make):
    assert not is_direct(made(make))


@pytest.mark.parametrize("kind", [SiluAndMul, RotaryEmbedding])
def test_patches_are_called(kind: type, monkeypatch):
    monkeypatch.setattr(kind, "forward_cpu", lambda *args: "patched")
    op = made(kind if kind is SiluAndMul else rotary)
    assert op(torch.zeros(1, 2), torch.zeros(1, 2), None)[:7] == "patched"


@pytest.mark.parametrize("make", [SiluAndMul, rotary])
def test_only_where_nothing_is_compiled(make):
    assert not is_direct(made(make, CompilationMode.VLLM_COMPILE))
    assert not is_direct(made(make, CompilationMode.DYNAMO_TRACE_ONCE))
