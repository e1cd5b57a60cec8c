# SPDX-License-Identifier: Apache-2.0
"""What Triton's interpreter lacks, and what it does over and over.

It is plain Python, so functions of Triton's own operations take the place of a GPU's
device library, which are stubs there that return None.
"""

import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from types import ModuleType

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
    """log(1 + x); a series where 1 + x would round x off."""
    return tl.where(tl.abs(x) < 1e-3, x - x * x / 2 + x * x * x / 3, tl.log(1 + x))


def _index(reduce: Callable, data: np.ndarray, **how) -> np.ndarray:
    """Of the largest or smallest number; NaNs alone are no error on a GPU either."""
    try:
        return reduce(data, **how)
    except ValueError:
        return reduce(np.nan_to_num(data), **how)


def _min_max(self, input, val_reduce_op, idx_reduce_op=None):
    index = idx_reduce_op and partial(_index, idx_reduce_op)
    return _reduce_min_max(self, input, val_reduce_op, index)


_reduce_min_max = interpreter.ReduceOps.min_max


class _Patched:
    """Stands for patches that are somebody else's to take back."""

    def restore(self) -> None:
        pass


@cache
def _languages(fn) -> list[ModuleType]:
    """The modules of operations that a kernel sees."""
    seen = [value for value in fn.__globals__.values() if inspect.ismodule(value)]
    return [lang for lang in (tl, tl.core) if lang in seen]


def _patch_once(fn):
    """Instead of the interpreter's own, which goes through all of them each time that
    one kernel calls another: a third of the time of kernels that do."""
    if all(not tl.core.is_builtin(lang.load) for lang in _languages(fn)):
        return _Patched()
    return _patch_lang(fn)


_patch_lang = interpreter._patch_lang


@cache
def mend() -> None:
    """Mends what is Triton's interpreter's alone."""
    interpreter.ReduceOps.min_max = _min_max
    interpreter._patch_lang = _patch_once
    # Checks of integer overflow, whose findings the interpreter never looks at.
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)
    JITFunction.__call__ = _call_interpreted


def _call_interpreted(self: JITFunction, *args, **kwargs):
    """What an interpreted kernel calls, where Triton is to compile."""
    return interpreter.InterpretedFunction(self.fn)(*args, **kwargs)


def interpret(kernel: JITFunction, grid, args: tuple, kwargs: dict) -> None:
    """Runs one kernel under the interpreter, where Triton is to compile."""
    mend()
    # All modules of operations, to be taken back for kernels that are compiled.
    patched = _patch_lang(log1p)
    patched.set_attr(libdevice, "log1p", log1p)
    try:
        with knobs.runtime.scope():
            knobs.runtime.interpret = True
            interpreter.InterpretedFunction(kernel.fn)[grid](*args, **kwargs)
    finally:
        patched.restore()


def install() -> None:
    """Has the interpreter run all kernels, and says so in the log."""
    mend()
    libdevice.log1p = log1p
    logger.info(
        "Triton kernels run under Triton's interpreter (TRITON_INTERPRET=1): right "
        "results, but slow. Unset it to run them compiled for the CPU."
    )
