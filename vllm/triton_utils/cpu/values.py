# SPDX-License-Identifier: Apache-2.0
"""The values of a kernel that is being compiled: registers, rules and memory.

A tensor is a rule that gives the register of an element at an index, so that a chain of
elementwise operations becomes the body of one loop, which LLVM vectorizes. Tensors are
put into memory if they have to be read at a certain point (loads), are expensive
(functions of the C library), or are carried by control flow.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from .arithmetic import llvm_type
from .builder import Builder
from .ttir import Operation, Region, Type

# From an index, a register of i64 or a number, to an element's register.
Rule = Callable[[str], str]
COPY = "llvm.memcpy.p0.p0.i64"


class Unsupported(Exception):
    """A kernel has an operation that cannot be compiled for a CPU; names it."""


class Kernel:
    """The state of the compilation of one kernel.

    Attributes:
        operations: by name, functions that emit them in LLVM assembly.
        functions: by name, the bodies of functions that the kernel calls.
        types: of all values.
        values: registers of scalars and of tensors of equal elements; else rules.
        known: elements that the loop being emitted already has in registers.
        labels: of blocks that a jump may lead to, and the memory of their arguments.
        exit: where `tt.return` jumps to, and the memory of what it returns; None in
            the kernel itself.
    """

    def __init__(
        self, operations: Mapping[str, Callable], functions: Mapping[str, Region]
    ) -> None:
        self.b = Builder()
        self.operations, self.functions = operations, functions
        self.types: dict[str, Type] = {}
        self.values: dict[str, str | Rule] = {}
        self.known: dict[tuple[str, str], str] = {}
        self.labels: dict[str, tuple[str, list[str]]] = {}
        self.exit: tuple[str, list[str]] | None = None

    def run(self, op: Operation) -> None:
        if op.name not in self.operations:
            raise Unsupported(op.name)
        self.operations[op.name](self, op)

    def define(self, name: str, kind: Type, value: str | Rule) -> None:
        self.types[name], self.values[name] = kind, value

    @contextmanager
    def scope(self, exit: tuple[str, list[str]]) -> Iterator[None]:
        """Code of a function that is called: its names and labels are its own."""
        outer = self.types, self.values, self.known, self.labels, self.exit
        self.types, self.values, self.known, self.labels = {}, {}, {}, {}
        self.exit = exit
        yield
        self.types, self.values, self.known, self.labels, self.exit = outer

    def is_uniform(self, name: str) -> bool:
        """Whether one register stands for all elements."""
        return isinstance(self.values[name], str)

    def element(self, name: str, index: str) -> str:
        value = self.values[name]
        if isinstance(value, str):
            return value
        if (name, index) not in self.known:
            self.known[name, index] = value(index)
        return self.known[name, index]

    def elements(self, names: list[str], index: str = "0") -> list[str]:
        return [self.element(name, index) for name in names]

    def over(self, count: int, body: Callable[[str], None], start: int = 0) -> None:
        """Emits a loop of `body` over indices from `start` to `count` - 1."""
        if count <= start:
            return
        outer, self.known = self.known, {}
        with self.b.loop(count, start) as index:
            body(index)
        self.known = outer

    # ---- memory ----

    def keep(self, kind: Type) -> str:
        """Reserves memory for a value; returns its address."""
        return self.b.slot(stored_type(kind.element), kind.size)

    def load(self, address: str, kind: Type, index: str = "0") -> str:
        stored, at = stored_type(kind.element), self._at(address, kind, index)
        value = self.b.let(f"load {stored}, ptr {at}")
        return self.b.let(f"trunc i8 {value} to i1") if kind.element == "i1" else value

    def store(self, value: str, address: str, kind: Type, index: str = "0") -> None:
        if kind.element == "i1":
            value = self.b.let(f"zext i1 {value} to i8")
        stored, at = stored_type(kind.element), self._at(address, kind, index)
        self.b.say(f"store {stored} {value}, ptr {at}")

    def _at(self, address: str, kind: Type, index: str) -> str:
        if index == "0":
            return address
        stored = stored_type(kind.element)
        return self.b.let(f"getelementptr {stored}, ptr {address}, i64 {index}")

    def load_all(self, memory: list[str], kinds: list[Type], index: str) -> list[str]:
        pairs = zip(memory, kinds, strict=True)
        return [self.load(address, kind, index) for address, kind in pairs]

    def store_all(
        self, values: list[str], memory: list[str], kinds: list[Type], index: str
    ) -> None:
        for value, address, kind in zip(values, memory, kinds, strict=True):
            self.store(value, address, kind, index)

    def define_kept(
        self, names: list[str], kinds: list[Type], memory: list[str]
    ) -> None:
        """Defines values in memory: scalars are read now, elements when needed."""
        for name, kind, address in zip(names, kinds, memory, strict=True):
            rule = lambda at, k=kind, a=address: self.load(a, k, at)  # noqa: E731
            self.define(name, kind, rule if kind.shape else rule("0"))

    def fixed(self, name: str) -> str | Rule:
        """A register, or a rule that reads memory that the tensor is put into here."""
        if self.is_uniform(name):
            return self.values[name]
        kind, memory = self.types[name], self._filled(name)
        return lambda index: self.load(memory, kind, index)

    def materialize(self, name: str) -> None:
        """Computes a tensor once. Only where it is defined: what comes later may be in
        another branch."""
        self.values[name] = self.fixed(name)

    def copy(self, names: list[str], memory: list[str]) -> None:
        """Copies values to memory; all are computed before one is overwritten."""
        sources = [
            self.values[name] if self.is_uniform(name) else self._filled(name)
            for name in names
        ]
        for name, source, address in zip(names, sources, memory, strict=True):
            kind = self.types[name]
            if self.is_uniform(name):
                self._spread(source, address, kind)
            else:
                size = kind.size * kind.num_bytes
                self.b.declared.add(f"declare void @{COPY}(ptr, ptr, i64, i1)")
                given = f"ptr {address}, ptr {source}, i64 {size}, i1 false"
                self.b.say(f"call void @{COPY}({given})")

    def _filled(self, name: str) -> str:
        kind = self.types[name]
        memory = self.keep(kind)
        self.over(
            kind.size, lambda i: self.store(self.element(name, i), memory, kind, i)
        )
        return memory

    def _spread(self, register: str, address: str, kind: Type) -> None:
        self.over(kind.size, lambda i: self.store(register, address, kind, i))


def stored_type(element: str) -> str:
    """A boolean takes a byte in memory."""
    return "i8" if element == "i1" else llvm_type(element)
