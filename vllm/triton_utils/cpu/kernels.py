# SPDX-License-Identifier: Apache-2.0
"""Runs Triton kernels on a CPU: `kernel[grid](...)` runs machine code of this CPU.

A kernel is compiled when it is launched with arguments of new types or with a new
constexpr, as on a GPU; but there is no specialization for alignment or for the value 1.
Machine code is kept in Triton's cache, `TRITON_CACHE_DIR`.
"""

import struct
from array import array
from collections.abc import Callable
from numbers import Integral, Real
from typing import Any

import torch
from triton.runtime.jit import JITFunction

from vllm.logger import init_logger

from .compiler import compile_kernel
from .values import Unsupported

logger = init_logger(__name__)

TYPES = {
    torch.bool: "*i1", torch.uint8: "*u8", torch.int8: "*i8", torch.int16: "*i16",
    torch.uint16: "*u16", torch.int32: "*i32", torch.uint32: "*u32",
    torch.int64: "*i64", torch.uint64: "*u64", torch.float16: "*fp16",
    torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.float64: "*fp64",
}  # fmt: skip
Key = tuple[Any, ...]  # types of arguments; types and values of constexprs


class CpuKernel:
    """A kernel, and its machine code by the types of its arguments.

    Attributes:
        constant: of each parameter, whether it is a constexpr.
    """

    def __init__(self, kernel: JITFunction) -> None:
        self.kernel = kernel
        self.names = kernel.arg_names
        self.constant = [parameter.is_constexpr for parameter in kernel.params]
        with_default = [one for one in kernel.params if one.has_default]
        self.defaults = {one.name: one.default for one in with_default}
        self.compiled: dict[Key, Callable[..., None]] = {}

    def launch(self, grid: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        """Runs all programs of a grid, one after the other."""
        values = self.bind(args, kwargs)
        if callable(grid):
            grid = grid(dict(zip(self.names, values, strict=True)))
        words, kinds = array("q"), []
        for value, is_constant in zip(values, self.constant, strict=True):
            kind = type(value)
            if is_constant:
                kinds += kind, value
            elif kind is torch.Tensor:
                words.append(value.data_ptr())
                kinds.append(value.dtype)
            elif kind is int and value.bit_length() < 32:
                words.append(value)
                kinds.append("i32")
            else:
                kinds.append(_read(value, words))
        key = tuple(kinds)
        if key not in self.compiled:
            self.compiled[key] = self.compile(values)
        if all(grid):
            self.compiled[key](words.buffer_info()[0], *grid, *(1,) * (3 - len(grid)))

    def bind(self, args: tuple, kwargs: dict[str, Any]) -> list[Any]:
        """All arguments in order; ignores options of a GPU's compiler."""
        defaults = self.defaults
        rest = self.names[len(args) :]
        named = [kwargs[name] if name in kwargs else defaults[name] for name in rest]
        return [*args, *named]

    def compile(self, values: list[Any]) -> Callable[..., None]:
        """Machine code for such values.

        Raises:
            Unsupported: the kernel has an operation that cannot be compiled.
        """
        logger.info_once("Triton kernels are compiled for this CPU.")
        signature, constants = {}, {}
        for at, (name, value) in enumerate(zip(self.names, values, strict=True)):
            if self.constant[at]:
                signature[name], constants[at,] = "constexpr", value
            else:
                kind = _read(value, array("q"))
                signature[name] = _typed(kind, (at,), constants)
        try:
            return compile_kernel(self.kernel, signature, constants)
        except Unsupported as operation:
            raise Unsupported(
                f"{operation} in the Triton kernel {self.kernel.__name__} cannot be "
                "compiled for a CPU: please report it. VLLM_USE_V2_MODEL_RUNNER=0 runs "
                "none."
            ) from None


def _read(value: Any, words: array) -> Any:
    """The type of an argument; adds its word, or a tuple's words, to `words`.

    Raises:
        TypeError: kernels on a CPU take no arguments of its type.
    """
    if isinstance(value, torch.Tensor):
        words.append(value.data_ptr())
        return value.dtype
    if value is None:
        return None
    if isinstance(value, bool):
        words.append(value)
        return "i1"
    if isinstance(value, (int, Integral)):  # NumPy's too
        is_short = -(2**31) <= value < 2**31
        words.append(int(value) if is_short else (int(value) + 2**63) % 2**64 - 2**63)
        return "i32" if is_short else "i64"
    if isinstance(value, (float, Real)):
        words.append(struct.unpack("q", struct.pack("d", value))[0])
        return "fp32"
    if isinstance(value, tuple):
        return type(value), tuple(_read(one, words) for one in value)
    raise TypeError(f"a kernel on a CPU takes no {type(value).__name__}")


def _typed(kind: Any, path: tuple[int, ...], constants: dict[tuple, Any]) -> Any:
    """Triton's name of a type; None becomes a constexpr."""
    if kind is None:
        constants[path] = None
        return "constexpr"
    if not isinstance(kind, tuple):
        return TYPES.get(kind, kind)
    of, members = kind
    typed = [_typed(one, (*path, i), constants) for i, one in enumerate(members)]
    return of(*typed) if hasattr(of, "_fields") else tuple(typed)


def install() -> None:
    """Makes kernels of `triton.jit` run on the CPU."""
    JITFunction.run = _run


def _run(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
    """Replaces Triton's own, which needs a GPU."""
    if warmup:
        return
    if not hasattr(self, "cpu_kernel"):
        self.cpu_kernel = CpuKernel(self)
    self.cpu_kernel.launch(grid, args, kwargs)
