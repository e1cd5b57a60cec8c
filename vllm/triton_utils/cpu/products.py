# SPDX-License-Identifier: Apache-2.0
"""Products of matrices, of floating-point type."""

from .arithmetic import convert_float, llvm_type
from .shapes import linear
from .ttir import Operation, Type
from .values import Kernel, Rule, Unsupported


def _dot(k: Kernel, op: Operation) -> None:
    """Adds weighted rows of the second matrix to the third, which vectorizes."""
    (kind,), (left, right) = op.result_types, op.operand_types
    if len(kind.shape) != 2 or kind.element[0] != "f":
        raise Unsupported(f"{op.name} of {left.element}, {len(kind.shape)} axes")
    *pair, before = op.operands
    first, second = map(k.fixed, pair)
    sums, element = k.keep(kind), Type(kind.element)
    k.copy([before], [sums])
    register = llvm_type(kind.element)

    def value(of: str | Rule, source: Type, row: str, column: str) -> str:
        found = of
        if not isinstance(of, str):
            found = of(linear(k.b, [row, column], source.shape))
        return convert_float(k.b, op, [found], source.element, kind.element)

    def row(i: str) -> None:
        k.over(left.shape[1], lambda step: add(i, step))

    def add(i: str, step: str) -> None:
        weight = value(first, left, i, step)

        def one(j: str) -> None:
            at = linear(k.b, [i, j], kind.shape)
            term = k.b.let(f"fmul {register} {weight}, {value(second, right, step, j)}")
            was = k.load(sums, element, at)
            k.store(k.b.let(f"fadd {register} {was}, {term}"), sums, element, at)

        k.over(kind.shape[1], one)

    k.over(kind.shape[0], row)
    k.define_kept(op.results, [kind], [sums])


PRODUCTS = {"tt.dot": _dot}
