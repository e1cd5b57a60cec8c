# SPDX-License-Identifier: Apache-2.0
"""The input kernel for CPU tensors: `csrc/prepare_inputs.cpp`."""

import ctypes
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from vllm.v1.worker.gpu.spec_decode.native import (
    NativeLibrary,
    kept_struct,
    struct,
    words,
)

from .structs import STRUCTS, Numbers

LIBRARY = NativeLibrary(
    Path(__file__).with_name("_prepare_inputs.so"),
    STRUCTS,
    "The input kernel of speculative decoding runs as a Triton kernel on the CPU, a "
    "little slower than as C++",
)


def launch(
    library: ctypes.CDLL,
    src: tuple,
    tables: tuple,
    out: tuple,
    sources: tuple[torch.Tensor, ...],
    hidden: tuple | None,
    numbers: Numbers,
) -> Callable[[], None]:
    """Runs the library on the arguments of the Triton kernel.

    Args:
        library: `LIBRARY.loaded`.

    Returns:
        Runs it again on the same addresses and numbers.
    """
    element_size = 0
    if hidden is not None:
        dtypes = {rows.dtype for rows in (*sources, hidden.fallback, hidden.out)}
        assert len(dtypes) == 1, f"hidden states of several dtypes: {dtypes}"
        element_size = hidden.out.element_size()
    name = "prepare_first_pass" if numbers.IS_FIRST else "prepare_later_pass"
    run = partial(
        getattr(library, name),
        struct(src),
        struct(tables),
        kept_struct(out),
        words(sources),
        None if hidden is None else struct(hidden),
        words(numbers),
        ctypes.c_int64(element_size),
    )
    run()
    return run
