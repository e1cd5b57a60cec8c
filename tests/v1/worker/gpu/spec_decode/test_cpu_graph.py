# SPDX-License-Identifier: Apache-2.0
"""Recorded passes: a replay gives the same bits, or recording is refused."""

from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from vllm.v1.worker.gpu.spec_decode.cpu_graph import (
    CPUGraph,
    Memory,
    NotRecordableError,
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


def copies(tensors: list[Tensor | None]) -> list[Tensor | None]:
    return [None if one is None else one.clone() for one in tensors]


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
    ],
    ids=["item", "mask", "equal", "random"],
)
def test_passes_that_depend_on_contents_are_refused(run):
    values = torch.randn(ROWS)
    with pytest.raises(NotRecordableError, match="depends on the contents"):
        record(lambda: run(values), [values], Memory())


def verified(run, first: Tensor, other: Tensor) -> CPUGraph:
    graph = record(lambda: run(first), [first], Memory())
    graph.verify(lambda: run(other), [other])
    return graph


def test_verification_finds_what_the_dispatcher_does_not_see():
    def run(values: Tensor) -> Tensor:
        doubled = torch.empty_like(values)
        doubled.numpy()[:] = 2 * values.numpy()
        return doubled + 1

    with pytest.raises(NotRecordableError, match="gives something else"):
        verified(run, torch.randn(ROWS), torch.randn(ROWS))


def test_verification_finds_replays_that_fail():
    table = torch.randn(VOCABULARY, SIZE)

    def run(values: Tensor) -> Tensor:
        index = torch.empty(ROWS, dtype=torch.int64)
        index.numpy()[:] = range(ROWS)
        return F.embedding(index, table) + values

    with pytest.raises(NotRecordableError, match="fails: index out of range"):
        verified(run, torch.randn(SIZE), torch.randn(SIZE))


def test_verification_finds_tensors_that_are_not_inputs():
    step = iter([torch.randn(ROWS), torch.randn(ROWS)])
    with pytest.raises(NotRecordableError, match="gives something else"):
        verified(lambda values: values + next(step), *torch.randn(2, ROWS))


def test_verification_restores_written_inputs():
    graph = verified(lambda values: values.add_(1) * 2, *torch.randn(2, ROWS))
    values = torch.randn(ROWS)
    expected = (values + 1) * 2
    assert torch.equal(graph.verify(lambda: values.add_(1) * 2, [values]), expected)
    assert torch.equal(values, expected / 2)
