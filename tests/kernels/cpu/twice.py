# SPDX-License-Identifier: Apache-2.0
"""Launches a kernel twice, compiled for the CPU and interpreted, and compares both."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import triton.language as tl
from triton import knobs
from triton.language import core  # noqa: F401  (the module of the functions names it)
from triton.language.extra import libdevice
from triton.runtime import interpreter
from triton.runtime.jit import JITFunction


def log1p(x):
    """log(1 + x), by a series where 1 + x would round x off."""
    return tl.where(tl.abs(x) < 1e-3, x - x * x / 2 + x * x * x / 3, tl.log(1 + x))


# Of a GPU's library, whose functions are stubs for the interpreter.
FUNCTIONS = {"log1p": log1p, "isnan": lambda x: x != x}


def interpret(kernel: JITFunction, grid, args: tuple, kwargs: dict) -> None:
    """Interprets one kernel, and those that it calls, though Triton compiles."""
    options = interpreter.interpreter_builder.options
    # Checks of integer overflow, whose results the interpreter never reads.
    interpreter.interpreter_builder.options = replace(options, sanitize_overflow=False)
    # Patches all modules of operations; restored for kernels that are compiled.
    patched = interpreter._patch_lang(log1p)
    for name, function in FUNCTIONS.items():
        patched.set_attr(libdevice, name, function)
    call = lambda self, *given, **named: interpreter.InterpretedFunction(self.fn)(  # noqa: E731
        *given, **named
    )
    patched.set_attr(JITFunction, "__call__", call)
    try:
        with knobs.runtime.scope():
            knobs.runtime.interpret = True
            interpreter.InterpretedFunction(kernel.fn)[grid](*args, **kwargs)
    finally:
        patched.restore()


def tensors(values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, tuple):
            yield from tensors(value)


class Twice:
    """Replaces `JITFunction.run`, which launches kernels."""

    def __init__(self, run: Any) -> None:
        self.run, self.names = run, set()  # names: of kernels that have been compared
        self.reached: list[torch.Tensor] = []  # by their addresses

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
