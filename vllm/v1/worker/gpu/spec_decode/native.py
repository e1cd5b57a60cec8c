# SPDX-License-Identifier: Apache-2.0
"""Kernels in C++ for CPU tensors, `csrc/`, called with ctypes.

The arguments of a library are tuples, each a C struct of the same fields, one 64-bit
word per field: the address of a tensor's first element, or a number.
"""

import ctypes
import zlib
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import torch

from vllm.logger import init_logger

logger = init_logger(__name__)

C_TYPES = {
    torch.int32: "int32_t*",
    torch.int64: "int64_t*",
    torch.float32: "float*",
    torch.uint64: "uint64_t*",
    None: "char*",
}


@dataclass(frozen=True)
class NativeLibrary:
    """A library, and the structs that both sides must agree on.

    Attributes:
        file: where the install puts it.
        structs: the tuples that it takes; see `tree/native.py`.
        instead: what runs if it cannot be loaded, for the log.
    """

    file: Path
    structs: tuple[type[tuple], ...]
    instead: str

    def header(self) -> str:
        """The C++ declarations of the tuples, in `csrc/`."""
        structs = "\n".join(map(_declare, self.structs))
        return f"""// SPDX-License-Identifier: Apache-2.0
// Written by csrc/write_structs.py from tree/native.py, which says what fields hold.

#include <cstdint>

{structs}
constexpr uint32_t STRUCTS_ID = {zlib.crc32(structs.encode())}u;
"""

    @cached_property
    def loaded(self) -> ctypes.CDLL | None:
        """The library; None, and one log line, if there is none for these structs."""
        try:
            return self._open()
        except (OSError, ValueError) as why:
            logger.warning(
                "%s. %s cannot be loaded: %s. Install a C++ compiler (g++ or clang++), "
                "then reinstall vLLM.",
                self.instead,
                self.file.name,
                why,
            )
            return None

    def _open(self) -> ctypes.CDLL:
        if not self.file.exists():
            raise OSError("it was not built")
        library = ctypes.CDLL(str(self.file))
        built_from = ctypes.c_uint32.in_dll(library, "structs_id").value
        if f" {built_from}u;" not in self.header():
            raise OSError("it was built from other sources")
        return library


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
    """The dtype of a tensor field, which may be optional."""
    if get_origin(hint) is not Annotated:
        hint = get_args(hint)[0]
    return hint.__metadata__[0]


def struct(values: tuple) -> ctypes.Array:
    """A struct, whose tensors must have the declared dtypes."""
    for (name, dtype), value in zip(_dtypes(type(values)).items(), values, strict=True):
        if isinstance(value, torch.Tensor):
            assert dtype in (None, value.dtype), f"{name} is {value.dtype}"
            assert value.is_cpu and value.stride(-1) == 1, name
    return words(values)


def words(values: tuple) -> ctypes.Array:
    """Addresses of tensors, and numbers; None is 0."""
    given = [v.data_ptr() if isinstance(v, torch.Tensor) else v or 0 for v in values]
    return (ctypes.c_int64 * len(given))(*given)
