# SPDX-License-Identifier: Apache-2.0
"""TTIR's operations on single elements, in LLVM's instructions.

An `Instruction` takes the builder, the operation, its operands' registers and the
elements' types of its first operand and of its result; it returns a register.
"""

import re
from collections.abc import Callable

import torch

from .builder import Builder
from .ttir import Operation

Instruction = Callable[[Builder, Operation, list[str], str, str], str]

# bfloat16 is held as 16 bits: LLVM's own conversions call functions that not every
# process has.
LLVM_TYPES = {"bf16": "i16", "f16": "half", "f32": "float", "f64": "double"}
BITS = {"bf16": 16, "f16": 16, "f32": 32, "f64": 64}
DTYPES = {
    "bf16": (torch.bfloat16, torch.int16),
    "f16": (torch.float16, torch.int16),
    "f32": (torch.float32, torch.int32),
    "f64": (torch.float64, torch.int64),
}


def llvm_type(element: str) -> str:
    return LLVM_TYPES.get(element, element)


def in_float32(instruction: Instruction) -> Instruction:
    """Computes bfloat16 in float32."""

    def say(b: Builder, op: Operation, x: list[str], kind: str, to: str) -> str:
        if kind != "bf16":
            return instruction(b, op, x, kind, to)
        wide = [_extend_bf16(b, one) for one in x]
        result = instruction(b, op, wide, "f32", "f32" if to == "bf16" else to)
        return _round_to_bf16(b, result) if to == "bf16" else result

    return say


def binary(name: str) -> Instruction:
    @in_float32
    def say(b: Builder, op: Operation, x: list[str], kind: str, to: str) -> str:
        return b.let(f"{name} {llvm_type(kind)} {x[0]}, {x[1]}")

    return say


def divide(name: str) -> Instruction:
    """Avoids division by zero, and of the least number by -1, which trap on a CPU:
    elements that are masked out may contain them."""

    def say(b: Builder, op: Operation, x: list[str], kind: str, to: str) -> str:
        if re.fullmatch(r"[1-9]\d*", x[1]):
            return b.let(f"{name} {kind} {x[0]}, {x[1]}")
        is_zero = b.let(f"icmp eq {kind} {x[1]}, 0")
        by = b.let(f"select i1 {is_zero}, {kind} 1, {kind} {x[1]}")
        if name[0] == "u":
            return b.let(f"{name} {kind} {x[0]}, {by}")
        is_minus = b.let(f"icmp eq {kind} {by}, -1")
        by = b.let(f"select i1 {is_minus}, {kind} 1, {kind} {by}")
        result = b.let(f"{name} {kind} {x[0]}, {by}")
        negated = b.let(f"sub {kind} 0, {result}")
        return b.let(f"select i1 {is_minus}, {kind} {negated}, {kind} {result}")

    return say


def convert(name: str) -> Instruction:
    @in_float32
    def say(b: Builder, op: Operation, x: list[str], kind: str, to: str) -> str:
        source, target = llvm_type(kind), llvm_type(to)
        if source == target:
            return x[0]
        return b.let(f"{name} {source} {x[0]} to {target}")

    return say


def convert_float(b: Builder, op: Operation, x: list[str], kind: str, to: str) -> str:
    if to == "bf16":
        return _round_to_bf16(b, convert_float(b, op, x, kind, "f32"))
    if kind == "bf16":
        return convert_float(b, op, [_extend_bf16(b, x[0])], "f32", to)
    if kind == to:
        return x[0]
    name = "fpext" if BITS[to] > BITS[kind] else "fptrunc"
    return b.let(f"{name} {llvm_type(kind)} {x[0]} to {llvm_type(to)}")


def _extend_bf16(b: Builder, value: str) -> str:
    bits = b.let(f"shl i32 {b.let(f'zext i16 {value} to i32')}, 16")
    return b.let(f"bitcast i32 {bits} to float")


def _round_to_bf16(b: Builder, value: str) -> str:
    """Rounds to nearest, ties to even. NaN stays NaN."""
    bits = b.let(f"bitcast float {value} to i32")
    odd = b.let(f"and i32 {b.let(f'lshr i32 {bits}, 16')}, 1")
    up = b.let(f"add i32 {b.let(f'add i32 {bits}, 32767')}, {odd}")
    is_nan = b.let(f"fcmp uno float {value}, {value}")
    quiet = b.let(f"or i32 {bits}, 4194304")
    rounded = b.let(f"select i1 {is_nan}, i32 {quiet}, i32 {up}")
    return b.let(f"trunc i32 {b.let(f'lshr i32 {rounded}, 16')} to i16")


def compare(name: str) -> Instruction:
    @in_float32
    def say(b: Builder, op: Operation, x: list[str], kind: str, to: str) -> str:
        condition = op.text.split(",")[0].strip()
        return b.let(f"{name} {condition} {llvm_type(kind)} {x[0]}, {x[1]}")

    return say


def select(b: Builder, op: Operation, x: list[str], kind: str, to: str) -> str:
    to = llvm_type(to)
    return b.let(f"select i1 {x[0]}, {to} {x[1]}, {to} {x[2]}")


def intrinsic(name: str, *more: str) -> Instruction:
    """An intrinsic of LLVM: a machine instruction, or a function of the C library."""

    @in_float32
    def say(b: Builder, op: Operation, x: list[str], kind: str, to: str) -> str:
        return b.call(
            f"llvm.{name}.{kind}", llvm_type(to), llvm_type(kind), [*x, *more]
        )

    return say


def function(name: str) -> Instruction:
    """A function of the C library."""

    @in_float32
    def say(b: Builder, op: Operation, x: list[str], kind: str, to: str) -> str:
        suffix = "f" if kind == "f32" else ""
        return b.call(name + suffix, llvm_type(to), llvm_type(kind), x)

    return say


def external(b: Builder, op: Operation, x: list[str], kind: str, to: str) -> str:
    """A function of a GPU's device library: the C library's, without the prefix."""
    name = op.attribute("symbol").removeprefix("__nv_")
    return b.call(name, llvm_type(to), llvm_type(kind), x)


@in_float32
def negate(b: Builder, op: Operation, x: list[str], kind: str, to: str) -> str:
    return b.let(f"fneg {llvm_type(kind)} {x[0]}")


def high_product(b: Builder, op: Operation, x: list[str], kind: str, to: str) -> str:
    """The upper half of the bits of a product."""
    width = int(kind[1:])
    wide = [b.let(f"zext {kind} {one} to i{2 * width}") for one in x]
    product = b.let(f"mul i{2 * width} {wide[0]}, {wide[1]}")
    high = b.let(f"lshr i{2 * width} {product}, {width}")
    return b.let(f"trunc i{2 * width} {high} to {kind}")


def advance(b: Builder, op: Operation, x: list[str], kind: str, to: str) -> str:
    """Advances a pointer by a number of elements; a boolean takes a byte."""
    pointer, offset = op.operand_types
    size = "i8" if pointer.pointee == "i1" else llvm_type(pointer.pointee)
    return b.let(f"getelementptr {size}, ptr {x[0]}, {offset.element} {x[1]}")


def constant(text: str, kind: str) -> str:
    """A constant as LLVM writes it; `text` is MLIR's, decimal or hexadecimal bits."""
    if kind not in DTYPES:
        return {"true": "1", "false": "0"}.get(text, text)
    of, whole = DTYPES[kind]
    is_bits = text.startswith("0x")
    bits = int(text, 16) if is_bits else torch.tensor(float(text), dtype=of).view(whole)
    if kind == "bf16":
        return f"{int(bits)}"
    return f"bitcast (i{BITS[kind]} {int(bits)} to {llvm_type(kind)})"
