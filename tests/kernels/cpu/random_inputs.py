# SPDX-License-Identifier: Apache-2.0
"""Finds Triton kernels in source files, and makes up small arguments for any of them.

What a parameter is follows from its name: in vLLM pointers end with `_ptr`, tables of
addresses with `_ptrs`, and sums begin with `cu_`; floats have one of a few words.
Memory can be read and written far beyond what small numbers reach, on both sides.
"""

import ast
import re
from pathlib import Path
from typing import Any

import torch
from triton.runtime.jit import JITFunction, KernelParam

REACH = 2**14  # elements on either side of a pointer
STRIDE, COUNT = 64, 3
POINTER = re.compile(
    "_ptrs?$|^(batch_idx_to_req_idx|idx_mapping|query_start_loc|pos|block_table_strides"
    "|block_sizes|slot_mapping_enabled|dcp_sharded|sizes)$"
)
FLOATS = re.compile(
    "(?<!num_)logits_ptr|logits_cache_ptr|(?<!fill_)logprobs_ptr|embeds_ptr|penalty|temp"
    "|hidden_states_ptr|max_ptr|sumexp|mass_ptr|log_p_ptr|features|pred_ptr|conf_ptr"
    "|slope|intercepts|min_p|info_ptr|grad_ptr|scores_ptr|entropy|rates|^bias_ptr|_val_ptr"
    "|base_ptr|^xh_|^lat_out|^w(1|lat|g|u|d)_|^mixl"
)
INT64 = re.compile(
    "seed|sampled|^positions|^target_positions|^pos(_ptr)?$|slot_map|strides$|^packed"
    "|^out_token_ids|_indices(?<!topk_indices)"
)
BOOLS = re.compile("enabled|skip_mask|is_padding|valid_mask|dcp_sharded|watermarking")
SUMS = re.compile("cu_|start_loc|offsets|cu_lens")
ADDRESSES = re.compile("_ptrs|_addrs")


def kernels_in(file: Path) -> list[str]:
    """Names of the kernels defined in a file: jitted, and called by no other."""
    text = file.read_text()
    if "triton.jit" not in text:
        return []
    functions = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef)]
    jitted = [
        one.name
        for one in functions
        if any("triton.jit" in ast.unparse(how) for how in one.decorator_list)
    ]
    return [name for name in jitted if not re.search(rf"(?<!def )\b{name}\(", text)]


def imported_by(files: list[Path], root: Path) -> set[Path]:
    """Files of the package in `root` that these import from directly."""
    texts = "\n".join(file.read_text() for file in files)
    names = set(re.findall(r"^ *from (vllm\.[\w.]+) import", texts, re.MULTILINE))
    paths = {root.parent / f"{name.replace('.', '/')}.py" for name in names}
    return set(filter(Path.is_file, paths))


class Arguments:
    """Arguments of one launch, `values` by name, and memory `reached` by addresses."""

    def __init__(self, kernel: JITFunction, known: dict[str, Any], seed: int) -> None:
        self.chance = torch.Generator().manual_seed(seed)
        self.seed = seed
        self.reached = self._numbers(COUNT).int()
        self.values = {
            one.name: known[one.name] if one.name in known else self._value(one)
            for one in kernel.params
        }

    def _value(self, parameter: KernelParam) -> Any:
        name = parameter.name
        if parameter.is_constexpr:
            return self._constexpr(parameter)
        if POINTER.search(name):
            return self._pointer(name)
        return STRIDE if "stride" in name else COUNT

    def _constexpr(self, parameter: KernelParam) -> Any:
        name = parameter.name
        if parameter.has_default:
            return parameter.default
        if re.search("BLOCK|PADDED|PO2|POW2", name):
            return 32
        if re.match("HAS_|USE_|IS_|INCLUDE_|SKIP_|APPLY_|DO_|PER_|per_|MASK_S", name):
            return bool(self.seed % 2)
        return 2

    def _pointer(self, name: str) -> torch.Tensor:
        """The middle of some memory."""
        if ADDRESSES.search(name):
            address = self.reached[REACH:].data_ptr()
            return torch.full((2 * REACH,), address, dtype=torch.uint64)[REACH:]
        if FLOATS.search(name):
            return (torch.rand(2 * REACH, generator=self.chance) + 0.5)[REACH:]
        if BOOLS.search(name):
            return self._numbers(1).bool()[REACH:]
        found = self._numbers(COUNT)
        if SUMS.search(name):
            found[REACH:] = found[REACH:].cumsum(0).clamp(max=STRIDE)
        return found.to(torch.int64 if INT64.search(name) else torch.int32)[REACH:]

    def _numbers(self, largest: int) -> torch.Tensor:
        return torch.randint(0, largest + 1, (2 * REACH,), generator=self.chance)
