# SPDX-License-Identifier: Apache-2.0
"""Every Triton kernel that a step of Model Runner V2 can launch on a CPU is compiled
there, and computes what the interpreter does.

The kernels are found in the release's files, so that another release's are tested too.
"""

import importlib
from pathlib import Path
from typing import Any

import pytest
from triton.runtime.jit import JITFunction

import vllm

from .random_inputs import Arguments, imported_by, kernels_in
from .twice import Twice

ROOT = Path(vllm.__file__).parent
STEP = sorted((ROOT / "v1/worker/gpu").rglob("*.py"))
OURS = ("/unified/", "/draft_tree/", "/argmax.py", "/trimming.py")
GRID = (3, 2)
# Files that a step imports for something else: their kernels are launched elsewhere.
ELSEWHERE = {
    "model_executor/layers/mamba/ops/ssu_dispatch.py": "the backend of a GPU",
    "v1/spec_decode/fly.py": "Runner V1",
    "v1/worker/block_table.py": "Runner V1",
    "v1/worker/gpu/sample/watermark.py": "a CPU refuses Runner V2 with watermarks",
}
# Arguments that do not follow from a parameter's name.
KNOWN: dict[str, dict[str, Any]] = {
    "_apply_grammar_bitmask_kernel": {"MASK_STRIDE": 1},
    "_apply_write_kernel": {"MULTI_GROUP": False},
    "_resample_kernel": {"WATERMARK": False},
    "_xpress_latent_kernel": {"B": 3, "BP": 16, "R": 16, "H": 32, "HT": 16},
}


def kernels() -> dict[str, list[str]]:
    """By file of the release, its kernels; ours have tests of their own."""
    files = sorted({*STEP, *imported_by(STEP, ROOT)})
    found = {str(file.relative_to(ROOT)): kernels_in(file) for file in files}
    return {
        name: each
        for name, each in found.items()
        if each and not any(part in name for part in OURS)
    }


KERNELS = kernels()
LAUNCHED = [
    (file, name) for file in KERNELS.keys() - ELSEWHERE for name in KERNELS[file]
]


def test_exceptions_are_exceptions():
    assert ELSEWHERE.keys() <= KERNELS.keys()


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("file, name", sorted(LAUNCHED))
def test_compiled_as_interpreted(twice: Twice, file: str, name: str, seed: int):
    module = f"vllm.{file.removesuffix('.py').replace('/', '.')}"
    kernel = getattr(importlib.import_module(module), name)
    function = kernel
    while not isinstance(function, JITFunction):
        function = function.fn
    given = Arguments(function, KNOWN.get(name, {}), seed)
    twice.reached = [given.reached]
    kernel[GRID](**given.values)
    assert twice.names == {name}
