# SPDX-License-Identifier: Apache-2.0
"""Operations along an axis, which have their own function to combine two elements."""

from .shapes import coordinates, linear
from .ttir import Operation, Type
from .values import Kernel

# Lanes of a reduction, so that LLVM vectorizes it: element i goes to lane i % LANES,
# and the lanes are combined in the end. Four vectors of lanes, which do not depend on
# each other, hide the latency of storing and loading one.
LANES = 64


class Along:
    """Access to the elements of an operation's tensors along its axis; `shape` is that
    of all other axes."""

    def __init__(self, k: Kernel, op: Operation) -> None:
        self.k, self.op = k, op
        self.axis = int(op.attribute("axis"))
        self.whole = op.operand_types[0].shape
        self.length = self.whole[self.axis]
        self.shape = self.whole[: self.axis] + self.whole[self.axis + 1 :]
        self.kinds = [Type(kind.element) for kind in op.operand_types]

    def index(self, outer: str, step: str) -> str:
        """Index of the element at `step` of the axis and `outer` of the others."""
        at = coordinates(self.k.b, outer, self.shape)
        return linear(self.k.b, [*at[: self.axis], step, *at[self.axis :]], self.whole)

    def combine(self, was: list[str], new: list[str]) -> list[str]:
        """Combines elements by the operation's own function."""
        ((block,),) = self.op.regions
        for (name, kind), value in zip(block.arguments.items(), was + new, strict=True):
            self.k.define(name, kind, value)
        *body, last = block.operations
        for operation in body:
            self.k.run(operation)
        return self.k.elements(last.operands)


def _reduce(k: Kernel, op: Operation) -> None:
    along = Along(k, op)
    kinds, lanes = along.kinds, min(along.length, LANES)
    running = [k.keep(Type(kind.element, (lanes,))) for kind in kinds]
    results = [Type(kind.element, along.shape) for kind in kinds]
    memory = [k.keep(kind) for kind in results]

    def body(outer: str) -> None:
        def first(lane: str) -> None:
            new = k.elements(op.operands, along.index(outer, lane))
            k.store_all(new, running, kinds, lane)

        def further(block: str) -> None:
            start = k.b.let(f"mul i64 {block}, {lanes}")

            def one(lane: str) -> None:
                step = k.b.let(f"add i64 {start}, {lane}")
                new = k.elements(op.operands, along.index(outer, step))
                fold(new, lane)

            k.over(lanes, one)

        def fold(new: list[str], lane: str) -> None:
            was = k.load_all(running, kinds, lane)
            k.store_all(along.combine(was, new), running, kinds, lane)

        k.over(lanes, first)
        k.over(along.length // lanes, further, start=1)
        k.over(lanes, lambda lane: fold(k.load_all(running, kinds, lane), "0"), start=1)
        k.store_all(k.load_all(running, kinds, "0"), memory, kinds, outer)

    k.over(Type("", along.shape).size, body)
    k.define_kept(op.results, results, memory)


def _scan(k: Kernel, op: Operation) -> None:
    along = Along(k, op)
    kinds = along.kinds
    running = [k.keep(kind) for kind in kinds]
    memory = [k.keep(kind) for kind in op.operand_types]
    is_reverse = op.attribute("reverse") == "true"

    def body(outer: str) -> None:
        def one(step: str, is_first: bool = False) -> None:
            if is_reverse:
                step = k.b.let(f"sub i64 {along.length - 1}, {step}")
            index = along.index(outer, step)
            new = k.elements(op.operands, index)
            if not is_first:
                new = along.combine(k.load_all(running, kinds, "0"), new)
            k.store_all(new, running, kinds, "0")
            k.store_all(new, memory, kinds, index)

        one("0", is_first=True)
        k.over(along.length, one, start=1)

    k.over(Type("", along.shape).size, body)
    k.define_kept(op.results, op.operand_types, memory)


REDUCTIONS = {"tt.reduce": _reduce, "tt.scan": _scan}
