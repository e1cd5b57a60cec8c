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
        each (a float is a double), and the size of the grid, three i32.

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
    given += [f"i32 %program.{axis}" for axis in AXES]
    given += [f"i32 %{axis}" for axis in AXES]
    for axis in AXES:
        _begin(b, axis)
    b.say(f"call void @kernel({', '.join(given)})")
    for axis in reversed(AXES):
        _end(b, axis)
    b.say("ret void")
    head = "define void @launch(ptr noalias readonly %words, i32 %x, i32 %y, i32 %z)"
    return "\n".join([f"{head} {{", "entry:", *b.lines, "}", ""])


def _argument(b: Builder, position: int, kind: str) -> str:
    """Loads an argument from its word; returns its register."""
    at = b.let(f"getelementptr i64, ptr %words, i64 {position}")
    if kind != "float":
        return b.let(f"load {kind}, ptr {at}")
    return b.let(f"fptrunc double {b.let(f'load double, ptr {at}')} to float")


def _begin(b: Builder, axis: str) -> None:
    """Begins the loop over an axis of the grid, which may be empty."""
    before, now = b.block, f"%program.{axis}"
    b.jump(f"head.{axis}")
    b.begin(f"head.{axis}")
    b.say(f"{now} = phi i32 [0, %{before}], [%next.{axis}, %latch.{axis}]")
    more = b.let(f"icmp ult i32 {now}, %{axis}")
    b.branch(more, f"body.{axis}", f"behind.{axis}")
    b.begin(f"body.{axis}")


def _end(b: Builder, axis: str) -> None:
    b.jump(f"latch.{axis}")
    b.begin(f"latch.{axis}")
    b.say(f"%next.{axis} = add nuw i32 %program.{axis}, 1")
    b.jump(f"head.{axis}")
    b.begin(f"behind.{axis}")
