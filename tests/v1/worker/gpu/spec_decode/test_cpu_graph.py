# SPDX-License-Identifier: Apache-2.0
"""Recorded passes: a replay gives the same bits, or recording is refused."""

import ctypes
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from vllm.v1.worker.gpu.spec_decode.cpu_graph import (
    Memory,
    NotRecordableError,
    copies,
    record,
)

ROWS, SIZE, VOCABULARY = 5, 32, 50


@pytest.fixture(autouse=True)
def inference():
    with torch.inference_mode():
        yield


class Layers(nn.Module):
    """What decoder layers consist of: lookups, views, in-place and functional ops."""

    def __init__(self, num_layers: int = 4) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)

        def weight(*size: int) -> nn.Parameter:
            values = torch.randn(*size, generator=generator)
            return nn.Parameter(values, requires_grad=False)

        self.embeddings = weight(VOCABULARY, SIZE)
        self.up = [weight(2 * SIZE, SIZE) for _ in range(num_layers)]
        self.down = [weight(SIZE, SIZE) for _ in range(num_layers)]
        self.cache = torch.zeros(64, SIZE)

    def forward(self, ids: Tensor, slots: Tensor, hidden: Tensor | None = None) -> Any:
        states = F.embedding(ids.long(), self.embeddings)
        residual = torch.zeros_like(states) if hidden is None else hidden
        for up, down in zip(self.up, self.down, strict=True):
            residual.add_(states)
            gate, value = F.linear(residual, up).split(SIZE, dim=-1)
            self.cache.index_copy_(0, slots, value.contiguous())
            rows = torch.empty_like(value)
            torch.mul(F.silu(gate), value, out=rows)
            states = F.linear(rows.view(-1, SIZE), down).clamp_(-3, 3)
        return states, residual


def inputs_of(seed: int, rows: int = ROWS, fed: bool = False) -> list[Tensor | None]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(VOCABULARY, (rows,), dtype=torch.int32, generator=generator)
    slots = torch.randperm(64, generator=generator)[:rows]
    return [ids, slots, torch.randn(rows, SIZE, generator=generator) if fed else None]


def recorded(model: nn.Module, inputs: list[Any], memory: Memory | None = None):
    return record(lambda: model(*inputs), inputs, memory or Memory())


@pytest.mark.parametrize("fed", [False, True])
def test_replays_equal_the_pass(fed: bool):
    """On other inputs, at other addresses; written inputs and the cache, too."""
    model = Layers()
    graph = recorded(model, inputs_of(0, fed=fed))
    assert not graph.pinned
    for seed in range(1, 6):
        inputs = inputs_of(seed, fed=fed)
        own = copies(inputs)
        expected = [one.clone() for one in model(*own)]
        cache = model.cache.clone()
        model.cache.zero_()
        assert graph.fits(inputs)
        found = graph.replay(inputs)
        assert all(map(torch.equal, expected, found))
        assert torch.equal(model.cache[inputs[1]], cache[inputs[1]])
        if fed:  # the residual is the input, in place
            assert found[1] is inputs[2]
            assert torch.equal(inputs[2], own[2])


def test_no_python_of_the_model_runs():
    model = Layers()
    inputs = inputs_of(0)
    graph = recorded(model, inputs)
    model.forward = None
    graph.replay(inputs_of(1))


def test_weights_are_read_in_each_replay():
    model = Layers()
    graph = recorded(model, inputs_of(0))
    model.down[0].mul_(2)
    expected = [one.clone() for one in model(*inputs_of(1))]
    assert all(map(torch.equal, expected, graph.replay(inputs_of(1))))


def test_tensors_of_a_pass_share_memory():
    """Those of four layers take little more than those of one, and two recordings have
    the same block; outputs have their own."""
    memory = Memory()
    large = recorded(Layers(), inputs_of(0), memory)
    small = recorded(Layers(), inputs_of(0, rows=2), memory)
    assert large.block is small.block
    row = SIZE * torch.float32.itemsize
    assert large.block.numel() < 2 * 6 * ROWS * row
    first = [one.clone() for one in large.replay(inputs_of(1))]
    small.replay(inputs_of(2, rows=2))
    assert all(map(torch.equal, first, large.output))


def test_operations_without_an_out_variant_are_copied():
    def run(values: Tensor) -> Tensor:
        # `to` has none; `topk` returns two tensors.
        top = values.to(torch.float64).topk(3)
        return top.values + top.indices

    inputs = [torch.randn(ROWS, SIZE)]
    graph = record(lambda: run(*inputs), inputs, Memory())
    for _ in range(3):
        values = torch.randn(ROWS, SIZE)
        assert torch.equal(graph.replay([values]), run(values))


def test_views_of_inputs_are_bound_to_their_address():
    buffer = torch.randn(3, ROWS)
    graph = record(lambda: buffer[1] + buffer[2], [buffer], Memory())
    assert graph.fits([buffer])
    assert not graph.fits([buffer.clone()])
    buffer.normal_()
    assert torch.equal(graph.replay([buffer]), buffer[1] + buffer[2])


@pytest.mark.parametrize(
    "run",
    [
        lambda values: values * values.sum().item(),
        lambda values: values[values > 0],
        lambda values: values if values.equal(values) else -values,
        lambda values: values + torch.rand(ROWS),
        lambda values: values if values.sum() > 0 else -values,
        lambda values: values + sum(values.tolist()),
        lambda values: values + float(values.numpy().sum()),
        lambda values: torch.where(values > 0)[0],
        lambda values: values.repeat_interleave(values.long().clamp(0)),
    ],
    ids=[
        "item",
        "mask",
        "equal",
        "random",
        "if",
        "tolist",
        "NumPy",
        "where",
        "repeat_interleave",
    ],
)
def test_passes_that_depend_on_contents_are_refused(run):
    values = torch.randn(ROWS)
    with pytest.raises(NotRecordableError, match="depends on the contents"):
        record(lambda: run(values), [values], Memory())


def test_operations_that_write_and_make_tensors_are_refused():
    normalize = torch.ops.aten._native_batch_norm_legit
    values, mean, variance = (
        torch.randn(2, ROWS, 4),
        torch.zeros(ROWS),
        torch.ones(ROWS),
    )
    with pytest.raises(NotRecordableError, match="also makes tensors"):
        record(
            lambda: normalize(values, None, None, mean, variance, True, 0.1, 1e-5),
            [values],
            Memory(),
        )


def test_integer_indices_are_recorded():
    """As M-RoPE has them; a list of indices is bound to its address."""
    table, index = torch.randn(VOCABULARY, SIZE), torch.arange(ROWS)
    graph = record(lambda: table[index], [index], Memory())
    assert not graph.fits([index.clone()])
    index.copy_(torch.tensor([3, 1, 4, 1, 5]))
    assert torch.equal(graph.replay([index]), table[index])


def test_a_refusal_leaves_inputs_as_they_were():
    def run(values: Tensor) -> Tensor:
        return values.add_(1) * values.sum().item()

    before = (values := torch.randn(ROWS)).clone()
    with pytest.raises(NotRecordableError):
        record(lambda: run(values), [values], Memory())
    assert torch.equal(values, before)


def fill(tensor: Tensor, value: int) -> None:
    """What the dispatcher does not see."""
    ctypes.memset(tensor.data_ptr(), value, tensor.nbytes)


def verify(run, first: Tensor, other: Tensor) -> None:
    """Records a pass on the first input, and verifies it on the second."""
    graph = record(lambda: run(first), [first], Memory())
    before = other.clone()
    expected = run(other.clone())
    try:
        found = graph.verify(lambda: run(other), [other])
    except NotRecordableError:
        assert torch.equal(other, before)
        raise
    assert torch.equal(found, expected)


def test_verification_finds_what_the_dispatcher_does_not_see():
    def run(values: Tensor) -> Tensor:
        fill(zeros := torch.empty_like(values), 0)
        return zeros + values.add_(1)

    with pytest.raises(NotRecordableError, match="gives something else"):
        verify(run, *torch.randn(2, ROWS))


def test_verification_finds_missing_writes_to_a_cache():
    """The pass itself, which makes them, comes after the replay."""
    cache, steps = torch.zeros(ROWS), iter((0x3C, 0x3D, 0x3E))

    def run(values: Tensor) -> Tensor:
        fill(cache, next(steps))
        return values + cache

    with pytest.raises(NotRecordableError, match="gives something else"):
        verify(run, *torch.randn(2, ROWS))


def test_verification_finds_replays_that_fail():
    table = torch.randn(VOCABULARY, SIZE)

    def run(values: Tensor) -> Tensor:
        fill(index := torch.empty(ROWS, dtype=torch.int64), 0)
        return F.embedding(index, table) + values

    with pytest.raises(IndexError, match="out of range"):
        verify(run, torch.randn(SIZE), torch.randn(SIZE))


def test_verification_finds_tensors_that_are_not_inputs():
    steps, first = iter(torch.randn(2, ROWS)), torch.randn(ROWS)

    def run(values: Tensor) -> Tensor:
        return values + next(steps)

    graph = record(lambda: run(first), [first], Memory())
    with pytest.raises(NotRecordableError, match="gives something else"):
        graph.verify(lambda: run(first), [first])


def test_verification_restores_written_inputs():
    verify(lambda values: values.add_(1) * 2, *torch.randn(2, ROWS))
