# SPDX-License-Identifier: Apache-2.0
"""Compiles a kernel, for arguments of certain types, to a function for this CPU."""

import hashlib
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import triton
from triton._C.libtriton import ir, passes
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import ASTSource
from triton.runtime.cache import get_cache_manager
from triton.runtime.jit import JITFunction

from . import machine
from .lowering import lower
from .ttir import parse_module

# What Triton's front end needs to know of a GPU.
OPTIONS = SimpleNamespace(
    allow_fp8e4nv=False,
    allowed_dot_input_precisions=("ieee",),
    arch="cpu",
    backend_name="cpu",
    debug=False,
    default_dot_input_precision="ieee",
    deprecated_fp8_dot_operand_dtypes=(),
    enable_fp_fusion=False,
    extern_libs=None,
    instrumentation_mode="",
    max_num_imprecise_acc_default=0,
    num_ctas=1,
    num_stages=1,
    num_warps=1,
    sanitize_overflow=False,
    supported_fp8_dtypes=(),
)
TARGET = GPUTarget("cpu", "", 1)
FUNCTIONS = {"min_dot_size": lambda left, right: (1, 1, 1)}


def compile_kernel(
    kernel: JITFunction, signature: dict[str, Any], constants: dict[tuple, Any]
) -> machine.Launch:
    """Compiles a kernel, or loads it from Triton's cache if it was compiled before.

    Args:
        signature: Triton's name of each parameter's type ("*i32", "constexpr"); for a
            tuple, a tuple of names.
        constants: values of the constexprs by their paths: (0,) is the first parameter,
            (0, 1) the second member of the tuple that it is.

    Raises:
        Unsupported: the kernel has an operation that cannot be compiled.
    """
    source = ASTSource(kernel, signature, constants, {})
    key = hashlib.sha256(f"{source.hash()} {_compiler()}".encode()).hexdigest()
    files = get_cache_manager(key)
    if found := files.get_file("launch.o"):
        return machine.load(Path(found).read_bytes())
    code = machine.compile_object(lower(*parse_module(front_end(source))))
    files.put(code, "launch.o", binary=True)
    return machine.load(code)


def front_end(source: ASTSource) -> str:
    """The text of the kernel's TTIR."""
    from triton.language.extra.cuda import libdevice

    context = ir.context()
    ir.load_dialects(context)
    modules = {"triton.language.extra.libdevice": libdevice}
    module = source.make_ir(TARGET, OPTIONS, FUNCTIONS, modules, context)
    manager = ir.pass_manager(context)
    common = passes.common
    for add in (common.add_inliner, common.add_canonicalizer, passes.ttir.add_combine,
                common.add_cse, common.add_licm, common.add_symbol_dce):  # fmt: skip
        add(manager)
    manager.run(module, "make_ttir")
    return module.str_nodebug()


@cache
def _compiler() -> str:
    """Everything that machine code depends on, except the kernel."""
    sources = sorted(Path(__file__).parent.glob("*.py"))
    own = hashlib.sha256(b"".join(file.read_bytes() for file in sources)).hexdigest()
    return f"{triton.__version__} {own} {machine.describe()}"
