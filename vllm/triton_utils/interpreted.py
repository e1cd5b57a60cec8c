# SPDX-License-Identifier: Apache-2.0
"""Additions to Triton's interpreter, and fixes.

The interpreter is plain Python, where functions of a GPU's device library are stubs
that return None; functions made of Triton's own operations replace them.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial

import numpy as np
import triton.language as tl
from triton import knobs
from triton.language import core  # noqa: F401  (log1p's module names it)
from triton.language.extra import libdevice
from triton.runtime import interpreter
from triton.runtime.jit import JITFunction

from vllm.logger import init_logger

logger = init_logger(__name__)


def log1p(x):
    """log(1 + x), by a series where 1 + x would round x off."""
    return tl.where(tl.abs(x) < 1e-3, x - x * x / 2 + x * x * x / 3, tl.log(1 + x))


def isnan(x):
    return x != x


FUNCTIONS = {"log1p": log1p, "isnan": isnan}


def _index(reduce: Callable, data: np.ndarray, **how) -> np.ndarray:
    """Index of the largest or smallest number; all NaN is no error, as on a GPU."""
    try:
        return reduce(data, **how)
    except ValueError:
        return reduce(np.nan_to_num(data), **how)


def _min_max(self, input, val_reduce_op, idx_reduce_op=None):
    index = idx_reduce_op and partial(_index, idx_reduce_op)
    return _reduce_min_max(self, input, val_reduce_op, index)


_reduce_min_max = interpreter.ReduceOps.min_max


@cache
def _fix() -> None:
    """Applies the fixes that concern only Triton's interpreter."""
    interpreter.ReduceOps.min_max = _min_max
    # Turns off checks of integer overflow, whose results the interpreter never reads.
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)
    JITFunction.__call__ = _call_interpreted


def _call_interpreted(self: JITFunction, *args, **kwargs):
    """Interprets a kernel that another calls, though Triton is set to compile."""
    return interpreter.InterpretedFunction(self.fn)(*args, **kwargs)


def interpret(kernel: JITFunction, grid, args: tuple, kwargs: dict) -> None:
    """Interprets one kernel, though Triton is set to compile."""
    _fix()
    # Patches all modules of operations; restored for kernels that are compiled.
    patched = interpreter._patch_lang(log1p)
    for name, function in FUNCTIONS.items():
        patched.set_attr(libdevice, name, function)
    try:
        with knobs.runtime.scope():
            knobs.runtime.interpret = True
            interpreter.InterpretedFunction(kernel.fn)[grid](*args, **kwargs)
    finally:
        patched.restore()


def install() -> None:
    """Prepares the interpreter to run all kernels, and logs that it does."""
    _fix()
    for name, function in FUNCTIONS.items():
        setattr(libdevice, name, function)
    logger.info(
        "Triton kernels run under Triton's interpreter (TRITON_INTERPRET=1): right "
        "results, but slow. Unset it to run them compiled for the CPU."
    )
