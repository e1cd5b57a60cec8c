# SPDX-License-Identifier: Apache-2.0
"""Lowers TTIR to LLVM assembly: programs run one after the other, and the elements of a
tensor in loops, which LLVM vectorizes."""

from .arithmetic import llvm_type
from .builder import Builder
from .control_flow import CONTROL_FLOW, say_blocks
from .elementwise import ELEMENTWISE
from .memory import MEMORY
from .products import PRODUCTS
from .reductions import REDUCTIONS
from .shapes import SHAPES
from .ttir import Region
from .values import Kernel

OPERATIONS = ELEMENTWISE | SHAPES | MEMORY | REDUCTIONS | PRODUCTS | CONTROL_FLOW
AXES = "xyz"


def lower(body: Region, functions: dict[str, Region]) -> str:
    """LLVM assembly of a kernel, and of `launch`, which runs it on a grid.

    Args:
        body, functions: what `parse_module` returned.

    Returns:
        A module. `launch(words, x, y, z)` takes the address of the arguments, 64 bits
        each (a float is a double), and the size of the grid, three i64 from 1 on.

    Raises:
        Unsupported: the kernel has an operation that cannot be compiled.
    """
    kernel = Kernel(OPERATIONS, functions)
    arguments = body[0].arguments
    for i, (name, kind) in enumerate(arguments.items()):
        kernel.define(name, kind, f"%a{i}")
    say_blocks(kernel, body)
    kinds = [llvm_type(kind.element) for kind in arguments.values()]
    given = [f"{kind} %a{i}" for i, kind in enumerate(kinds)]
    given += [f"i32 %program.{axis}" for axis in AXES]
    given += [f"i32 %programs.{axis}" for axis in AXES]
    function = kernel.b.function(f"void @kernel({', '.join(given)})")
    return "\n".join([*sorted(kernel.b.declared), function, _launch(kinds)])


def _launch(kinds: list[str]) -> str:
    b = Builder()
    values = [_argument(b, i, kind) for i, kind in enumerate(kinds)]
    given = [f"{kind} {value}" for kind, value in zip(kinds, values, strict=True)]
    with b.loop("%x") as x, b.loop("%y") as y, b.loop("%z") as z:
        given += [f"i32 {b.let(f'trunc i64 {at} to i32')}" for at in (x, y, z)]
        given += [f"i32 {b.let(f'trunc i64 %{axis} to i32')}" for axis in AXES]
        b.say(f"call void @kernel({', '.join(given)})")
    b.say("ret void")
    head = "define void @launch(ptr noalias readonly %words, i64 %x, i64 %y, i64 %z)"
    return "\n".join([f"{head} {{", "entry:", *b.lines, "}", ""])


def _argument(b: Builder, position: int, kind: str) -> str:
    """Loads an argument from its word; returns its register."""
    at = b.let(f"getelementptr i64, ptr %words, i64 {position}")
    if kind != "float":
        return b.let(f"load {kind}, ptr {at}")
    return b.let(f"fptrunc double {b.let(f'load double, ptr {at}')} to float")
