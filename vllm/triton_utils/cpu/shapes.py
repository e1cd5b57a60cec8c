# SPDX-License-Identifier: Apache-2.0
"""Operations that create or rearrange tensors. Elements are in row-major order."""

import re
from collections.abc import Callable

from .arithmetic import constant
from .builder import Builder
from .ttir import Operation, Type, parse_types
from .values import Kernel, Unsupported


def coordinates(b: Builder, index: str, shape: tuple[int, ...]) -> list[str]:
    found = []
    for length in reversed(shape):
        found.append(b.let(f"urem i64 {index}, {length}"))
        index = b.let(f"udiv i64 {index}, {length}")
    return found[::-1]


def linear(b: Builder, at: list[str], shape: tuple[int, ...]) -> str:
    """The index of the element at these coordinates."""
    if len(at) == 1:
        return at[0]
    index = "0"
    for coordinate, length in zip(at, shape, strict=True):
        index = b.let(f"mul i64 {index}, {length}")
        index = b.let(f"add i64 {index}, {coordinate}")
    return index


def _constant(k: Kernel, op: Operation) -> None:
    kind = parse_types(op.types)[0] if op.types else Type("i1")
    number = re.fullmatch(r"(?:dense<)?([\w.+-]+)>?", op.text.strip())
    if number is None:
        raise Unsupported("a constant of several numbers")
    k.define(op.results[0], kind, constant(number.group(1), kind.element))


def _program(register: str) -> Callable[[Kernel, Operation], None]:
    def say(k: Kernel, op: Operation) -> None:
        k.define(op.results[0], Type("i32"), f"%{register}.{op.text.strip()}")

    return say


def _range(k: Kernel, op: Operation) -> None:
    start = op.attribute("start")

    def rule(index: str) -> str:
        return k.b.let(f"add i32 {k.b.let(f'trunc i64 {index} to i32')}, {start}")

    k.define(op.results[0], op.result_types[0], rule)


def _splat(k: Kernel, op: Operation) -> None:
    k.define(op.results[0], op.result_types[0], k.values[op.operands[0]])


def _moved(k: Kernel, op: Operation, index_of: Callable[[str], str]) -> None:
    (name,), (kind,) = op.operands, op.result_types
    rule = lambda index: k.element(name, index_of(index))  # noqa: E731
    k.define(op.results[0], kind, k.values[name] if k.is_uniform(name) else rule)


def _same(k: Kernel, op: Operation) -> None:
    _moved(k, op, lambda index: index)


def _broadcast(k: Kernel, op: Operation) -> None:
    (source,), (target,) = op.operand_types, op.result_types

    def index_of(index: str) -> str:
        pairs = zip(coordinates(k.b, index, target.shape), source.shape, strict=True)
        at = [coordinate if length > 1 else "0" for coordinate, length in pairs]
        return linear(k.b, at, source.shape)

    _moved(k, op, index_of)


def _transpose(k: Kernel, op: Operation) -> None:
    (source,), (target,) = op.operand_types, op.result_types
    order = list(map(int, op.attribute("order").split(",")))

    def index_of(index: str) -> str:
        at = coordinates(k.b, index, target.shape)
        at = [at[order.index(axis)] for axis in range(len(order))]
        return linear(k.b, at, source.shape)

    _moved(k, op, index_of)


SHAPES = {
    "arith.constant": _constant,
    "tt.broadcast": _broadcast,
    "tt.expand_dims": _same,
    "tt.get_num_programs": _program("programs"),
    "tt.get_program_id": _program("program"),
    "tt.make_range": _range,
    "tt.reshape": _same,
    "tt.splat": _splat,
    "tt.trans": _transpose,
}
