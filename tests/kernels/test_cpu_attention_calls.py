# SPDX-License-Identifier: Apache-2.0
"""Attention on a CPU is hidden in a custom op only from a compiler."""

from dataclasses import replace
from itertools import accumulate
from types import SimpleNamespace
from unittest.mock import Mock, patch

import pytest
import torch

from vllm import _custom_ops as ops
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
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends import cpu_attn
from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadata

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


HEADS, KV_HEADS, SIZE, BLOCK = 4, 2, 32, 32
LENS, CONTEXT = [3, 2], [40, 5]  # tokens of a step's requests, and before it
ROWS = sum(LENS)


@pytest.fixture
def make_layer(models):
    def make(kind=Attention, mode=CompilationMode.NONE, attention=None, **given):
        config = VllmConfig(
            model_config=ModelConfig(str(models / "target"), dtype="float32"),
            compilation_config=CompilationConfig(mode=mode),
            **given,
        )
        with set_current_vllm_config(config):
            layer = kind(
                HEADS,
                SIZE,
                0.1,
                num_kv_heads=KV_HEADS,
                prefix="layer",
                **attention or {},
            )
            layer.process_weights_after_loading(torch.float32)
        layer.isa = "vec"
        layer.kv_cache = torch.randn(8, KV_HEADS, BLOCK, 2 * SIZE)
        return SimpleNamespace(layer=layer, config=config)

    return make


def is_direct(layer: Attention) -> bool:
    return "forward" in vars(layer)


def metadata(layer: Attention, **changed) -> CPUAttentionMetadata:
    starts = torch.tensor([0, *accumulate(LENS)], dtype=torch.int32)
    lens = torch.tensor(LENS, dtype=torch.int32)
    seq_lens = torch.tensor(CONTEXT, dtype=torch.int32) + lens
    schedule = ops.cpu_attn_get_scheduler_metadata(
        num_reqs=len(LENS),
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=SIZE,
        seq_lens=seq_lens,
        dtype=torch.float32,
        query_start_loc=starts,
        causal=True,
        sliding_window_size=layer.impl.sliding_window,
        isa=layer.isa,
        enable_kv_split=True,
    )
    made = CPUAttentionMetadata(
        num_actual_tokens=ROWS,
        max_query_len=max(LENS),
        query_start_loc=starts,
        max_seq_len=int(seq_lens.max()),
        seq_lens=seq_lens,
        block_table=torch.tensor([[1, 2], [3, 0]], dtype=torch.int32),
        slot_mapping=SLOTS,
        scheduler_metadata=schedule,
    )
    return replace(made, **changed)


SLOTS = torch.tensor([2 * BLOCK + 8 + i for i in range(3)] + [3 * BLOCK + 5, 102])


def run(made: SimpleNamespace, forward, slots=None, more=None, **changed):
    """The output of a step, and the KV cache after it."""
    slots = {"layer": SLOTS} if slots is None else slots
    torch.manual_seed(0)
    query = torch.randn(ROWS, HEADS * SIZE)
    key, value = torch.randn(2, ROWS, KV_HEADS * SIZE)
    made.layer.kv_cache = torch.randn(8, KV_HEADS, BLOCK, 2 * SIZE)
    step = {"layer": metadata(made.layer, **changed)}
    with set_forward_context(step, made.config, slot_mapping=slots):
        output = forward(query, key, value, **more or {})
    return output[: changed.get("num_actual_tokens")], made.layer.kv_cache


def as_usual(layer: Attention):
    return lambda *given, **more: Attention.forward(layer, *given, **more)


@pytest.mark.parametrize("slots", [{"layer": SLOTS}, {}], ids=["slots", "none"])
@pytest.mark.parametrize(
    "attention",
    [
        {},
        {"per_layer_sliding_window": 16},
        {"logits_soft_cap": 2.0},
        {"alibi_slopes": [0.5, 0.25, 0.125, 0.0625]},
        {"sinks": torch.randn(HEADS)},
    ],
    ids=lambda attention: "".join(attention) or "plain",
)
def test_direct_calls_give_the_usual_result(make_layer, attention, slots):
    made = make_layer(attention=attention)
    assert is_direct(made.layer)
    for _ in range(2):  # the second time with another KV cache
        output, cache = run(made, made.layer, slots)
        wanted, wanted_cache = run(made, as_usual(made.layer), slots)
        assert torch.equal(output, wanted) and torch.equal(cache, wanted_cache)


@pytest.mark.parametrize(
    "changed",
    [
        {"more": {"output_shape": torch.Size((ROWS, HEADS * SIZE))}},
        {"num_actual_tokens": ROWS - 1},
    ],
    ids=["shape", "padded"],
)
def test_unusual_steps_are_as_usual(make_layer, changed):
    made = make_layer()
    output, cache = run(made, made.layer, **changed)
    wanted, wanted_cache = run(made, as_usual(made.layer), **changed)
    assert torch.equal(output, wanted) and torch.equal(cache, wanted_cache)


def test_without_keys_the_call_is_the_usual_one(make_layer):
    made, seen = make_layer(), Mock()
    step = {"layer": metadata(made.layer)}
    with (
        patch.object(made.layer.impl, "forward", seen),
        set_forward_context(step, made.config, slot_mapping={"layer": SLOTS}),
    ):
        made.layer(torch.randn(ROWS, HEADS * SIZE), None, None)
    assert seen.call_count == 1


def test_trees_are_left_to_the_implementation(make_layer):
    made, tree = make_layer(), object()
    with patch.object(cpu_attn, "attend_with_tree") as attend:
        run(made, made.layer, draft_tree=tree)
    assert attend.call_args.args[6].draft_tree is tree


@pytest.mark.parametrize("method", ["forward", "do_kv_cache_update"])
@pytest.mark.parametrize("on", ["class", "instance"])
def test_implementations_may_be_patched_later(make_layer, on, method):
    made = make_layer()
    run(made, made.layer)
    target = made.layer.impl if on == "instance" else type(made.layer.impl)
    with patch.object(target, method) as patched:
        run(made, made.layer)
    assert patched.call_count == 1


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
        {"attention": {"attn_type": AttentionType.ENCODER_ONLY}},
        {"attention": {"sinks": torch.randn(HEADS, dtype=torch.float16)}},
    ],
    ids=["class", "compiled", "connector", "encoder", "sinks"],
)
def test_other_layers_are_called_as_usual(make_layer, given):
    assert not is_direct(make_layer(**given).layer)


def test_patched_layers_are_called_as_usual(make_layer, monkeypatch):
    monkeypatch.setattr(Attention, "forward", lambda *given: None)
    assert not is_direct(make_layer().layer)
