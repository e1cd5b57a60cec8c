# SPDX-License-Identifier: Apache-2.0
"""The input kernel in C++ for CPU tensors: `csrc/prepare_inputs.cpp`, by ctypes.

Each NamedTuple that the Triton kernel takes is a struct of the same fields there, one
word of 64 bits a field: the address of a tensor's first element, or a number.
"""

import ctypes
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

from vllm.logger import init_logger

logger = init_logger(__name__)

LIBRARY = Path(__file__).with_name("_prepare_inputs.so")

_DTYPES = {
    "input_ids": torch.int32,
    "positions": torch.int64,
    "query_start_loc": torch.int32,
    "idx_mapping": torch.int64,
    "num_sampled": torch.int32,
    "num_rejected": torch.int32,
    "last_sampled": torch.int64,
    "next_prefill_tokens": torch.int32,
    "temperature": torch.float32,
    "seeds": torch.int64,
    "draft_tokens": torch.int64,
    "block_table_ptrs": torch.uint64,
    "strides": torch.int64,
    "block_sizes": torch.int32,
    "num_blocks": torch.int32,
    "slot_mappings": torch.int64,
    "seq_lens": torch.int32,
    "first_positions": torch.int64,
    "sample_rows": torch.int64,
    "sample_positions": torch.int64,
    "sample_requests": torch.int64,
}


class _Pass(NamedTuple):
    num_reqs: int
    draft_pass: int
    num_samples: int
    num_padded_tokens: int
    limit: int
    mask_token_id: int
    shift: int
    width: int
    groups: int
    num_sources: int
    source_bytes: int  # of a row of one source


@cache
def load(*structs: type[tuple]) -> ctypes.CDLL | None:
    """The library; None, and one log line, where it was not built or does not fit.

    Args:
        structs: what will be passed to it, in the order of its `struct_sizes`.
    """
    try:
        return _open(structs)
    except (OSError, ValueError) as why:
        logger.warning(
            "The input kernel of speculative decoding is interpreted on the CPU, which "
            "is slow, for want of %s: %s. Install a C++ compiler (g++ or clang++), "
            "then vLLM again.",
            LIBRARY.name,
            why,
        )
        return None


def _open(structs: tuple[type[tuple], ...]) -> ctypes.CDLL:
    if not LIBRARY.exists():
        raise OSError("it was not built")
    library = ctypes.CDLL(str(LIBRARY))
    sizes = (ctypes.c_int64 * (len(structs) + 1)).in_dll(library, "struct_sizes")
    if list(sizes) != [8 * len(struct._fields) for struct in (*structs, _Pass)]:
        raise OSError("it was built from other sources")
    return library


def launch(
    library: ctypes.CDLL,
    num_reqs: int,
    src: tuple,
    tables: tuple,
    out: tuple,
    sources: tuple[torch.Tensor, ...],
    hidden: tuple | None,
    *numbers: int,
    SHIFT: int,
    WIDTH: int,
    IS_FIRST: bool,
    GROUPS: int,
    SOURCES: int,
    SIZE: int,
) -> None:
    """Runs the library on the arguments of the Triton kernel.

    Args:
        library: what `load` returned.
        num_reqs: requests of the batch, padded ones included.
        numbers: draft_pass, num_samples, num_padded_tokens, limit, mask_token_id.
    """
    row_bytes = 0
    if sources:
        dtypes = {rows.dtype for rows in (*sources, hidden.stand_ins, hidden.out)}
        assert len(dtypes) == 1, f"hidden states of several dtypes: {dtypes}"
        row_bytes = SIZE * hidden.out.element_size()
    shape = _Pass(num_reqs, *numbers, SHIFT, WIDTH, GROUPS, SOURCES, row_bytes)
    run = library.prepare_first_pass if IS_FIRST else library.prepare_later_pass
    run(
        _struct(src),
        _struct(tables),
        _struct(out),
        _words(sources),
        _words(hidden) if sources else None,
        _words(shape),
    )


def _struct(values: tuple) -> ctypes.Array:
    """As `_words`, for tensors that the library expects to have a certain dtype."""
    for name, value in zip(values._fields, values, strict=True):
        if isinstance(value, torch.Tensor):
            assert value.dtype == _DTYPES[name], f"{name} is {value.dtype}"
            assert value.stride(-1) == 1 and value.device.type == "cpu", name
    return _words(values)


def _words(values: tuple) -> ctypes.Array:
    words = [v.data_ptr() if isinstance(v, torch.Tensor) else v for v in values]
    return (ctypes.c_int64 * len(words))(*words)
