# SPDX-License-Identifier: Apache-2.0
"""Launches a kernel twice, compiled for the CPU and interpreted, and compares both."""

from collections.abc import Iterator
from typing import Any

import torch
from triton.runtime.jit import JITFunction

from vllm.triton_utils.interpreted import interpret


def tensors(values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, tuple):
            yield from tensors(value)


class Twice:
    """Replaces `JITFunction.run`, which launches kernels.

    Attributes:
        names: names of kernels whose launches have been compared.
        reached: tensors that kernels reach by their addresses.
    """

    def __init__(self, run: Any) -> None:
        self.run, self.names = run, set()
        self.reached: list[torch.Tensor] = []

    def __call__(self, kernel: JITFunction, *args: Any, grid, warmup, **kwargs: Any):
        given = list(tensors([*args, *kwargs.values(), *self.reached]))
        memory = {one.untyped_storage().data_ptr(): one for one in given}
        storages = [one.untyped_storage() for one in memory.values()]
        before = [storage.clone() for storage in storages]
        interpret(kernel, grid, args, kwargs)
        expected = [one.clone() for one in given]
        for storage, saved in zip(storages, before, strict=True):
            storage.copy_(saved)
        self.run(kernel, *args, grid=grid, warmup=warmup, **kwargs)
        assert all(kernel.cpu_kernel.compiled.values()), kernel.__name__
        for found, wanted in zip(given, expected, strict=True):
            compare(found, wanted, kernel.__name__)
        self.names.add(kernel.__name__)


def compare(found: torch.Tensor, wanted: torch.Tensor, name: str) -> None:
    """Bit for bit, except for rounding of floats: sums have another order, and NumPy's
    functions differ from the C library's."""
    if found.is_floating_point():
        torch.testing.assert_close(
            found, wanted, rtol=2e-6, atol=1e-6, equal_nan=True,
            msg=lambda text: f"{name}: {text}",
        )  # fmt: skip
    else:
        assert torch.equal(found, wanted), name
