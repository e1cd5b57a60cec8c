# SPDX-License-Identifier: Apache-2.0
"""The input kernel for CPU tensors: `csrc/prepare_inputs.cpp`, called by ctypes.

Each tuple of `structs.py` is a C struct of the same fields, one word of 64 bits a
field: the address of a tensor's first element, or a number.
"""

import ctypes
import zlib
from functools import cache
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import torch

from vllm.logger import init_logger

from .structs import STRUCTS, Numbers

logger = init_logger(__name__)

LIBRARY = Path(__file__).with_name("_prepare_inputs.so")
C_TYPES = {
    torch.int32: "int32_t*",
    torch.int64: "int64_t*",
    torch.float32: "float*",
    torch.uint64: "uint64_t*",
    None: "char*",
}


def header() -> str:
    """The C++ declarations of the tuples, `csrc/structs.h`."""
    structs = "\n".join(map(_declare, STRUCTS))
    return f"""// SPDX-License-Identifier: Apache-2.0
// Written by csrc/write_structs.py from structs.py, which says what the fields hold.

#include <cstdint>

{structs}
constexpr uint32_t STRUCTS_ID = {zlib.crc32(structs.encode())}u;
"""


def _declare(struct: type[tuple]) -> str:
    fields = "".join(
        f"  {'int64_t' if dtype == 'number' else C_TYPES[dtype]} {name.lower()};\n"
        for name, dtype in _dtypes(struct).items()
    )
    return f"struct {struct.__name__} {{\n{fields}}};\n"


@cache
def _dtypes(struct: type[tuple]) -> dict[str, Any]:
    """By field: the dtype of its tensor, None if it may be any, or "number"."""
    hints = get_type_hints(struct, include_extras=True)
    return {
        name: "number" if hint is int or hint is bool else _dtype(hint)
        for name, hint in hints.items()
    }


def _dtype(hint: Any) -> torch.dtype | None:
    """Of a tensor, or of one that may be missing."""
    if get_origin(hint) is not Annotated:
        hint = get_args(hint)[0]
    return hint.__metadata__[0]


@cache
def load() -> ctypes.CDLL | None:
    """The library; None, and one log line, where it was not built or does not fit."""
    try:
        return _open()
    except (OSError, ValueError) as why:
        logger.warning(
            "The input kernel of speculative decoding runs as Triton's on the CPU, a "
            "little slower than as C++, for want of %s: %s. Install a C++ compiler "
            "(g++ or clang++), then vLLM again.",
            LIBRARY.name,
            why,
        )
        return None


def _open() -> ctypes.CDLL:
    if not LIBRARY.exists():
        raise OSError("it was not built")
    library = ctypes.CDLL(str(LIBRARY))
    built_from = ctypes.c_uint32.in_dll(library, "structs_id").value
    if f" {built_from}u;" not in header():
        raise OSError("it was built from other sources")
    return library


def launch(
    library: ctypes.CDLL,
    src: tuple,
    tables: tuple,
    out: tuple,
    sources: tuple[torch.Tensor, ...],
    hidden: tuple | None,
    numbers: Numbers,
) -> None:
    """Runs the library on the arguments of the Triton kernel.

    Args:
        library: what `load` returned.
    """
    element_size = 0
    if hidden is not None:
        dtypes = {rows.dtype for rows in (*sources, hidden.fallback, hidden.out)}
        assert len(dtypes) == 1, f"hidden states of several dtypes: {dtypes}"
        element_size = hidden.out.element_size()
    name = "prepare_first_pass" if numbers.IS_FIRST else "prepare_later_pass"
    getattr(library, name)(
        _struct(src),
        _struct(tables),
        _struct(out),
        _words(sources),
        None if hidden is None else _struct(hidden),
        _struct(numbers),
        ctypes.c_int64(element_size),
    )


def _struct(values: tuple) -> ctypes.Array:
    """A struct, of tensors that have the dtypes it is declared with."""
    for (name, dtype), value in zip(_dtypes(type(values)).items(), values, strict=True):
        if isinstance(value, torch.Tensor):
            assert dtype in (None, value.dtype), f"{name} is {value.dtype}"
            assert value.stride(-1) == 1 and value.device.type == "cpu", name
    return _words(values)


def _words(values: tuple) -> ctypes.Array:
    words = [v.data_ptr() if isinstance(v, torch.Tensor) else v or 0 for v in values]
    return (ctypes.c_int64 * len(words))(*words)
