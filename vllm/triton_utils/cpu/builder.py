# SPDX-License-Identifier: Apache-2.0
"""Writes one function in LLVM assembly, https://llvm.org/docs/LangRef.html."""

from collections.abc import Iterator
from contextlib import contextmanager


class Builder:
    """Registers and labels are numbered; `block` is the label of the current block."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.slots: list[str] = []
        self.declared: set[str] = set()
        self.count = 0
        self.block = "entry"

    def name(self) -> str:
        self.count += 1
        return f"v{self.count}"

    def say(self, line: str) -> None:
        self.lines.append(f"  {line}")

    def let(self, instruction: str) -> str:
        """Emits an instruction; returns the register of its result."""
        register = f"%{self.name()}"
        self.say(f"{register} = {instruction}")
        return register

    def slot(self, kind: str, size: int = 1) -> str:
        """The address of stack memory, reserved once at the function's entry."""
        register = f"%{self.name()}"
        self.slots.append(f"  {register} = alloca {kind}, i64 {size}, align 64")
        return register

    def call(self, function: str, returns: str, kind: str, given: list[str]) -> str:
        """Calls a function whose arguments are all of one type, except booleans."""
        types = ["i1" if value in ("true", "false") else kind for value in given]
        self.declared.add(f"declare {returns} @{function}({', '.join(types)})")
        pairs = ", ".join(f"{t} {value}" for t, value in zip(types, given, strict=True))
        return self.let(f"call {returns} @{function}({pairs})")

    def begin(self, label: str) -> None:
        self.lines.append(f"{label}:")
        self.block = label

    def jump(self, label: str) -> None:
        self.say(f"br label %{label}")

    def branch(self, condition: str, yes: str, no: str) -> None:
        self.say(f"br i1 {condition}, label %{yes}, label %{no}")

    @contextmanager
    def when(self, condition: str | None) -> Iterator[None]:
        """Code that is emitted within runs if the condition holds; None: always."""
        if condition is None:
            yield
            return
        inside, behind = self.name(), self.name()
        self.branch(condition, inside, behind)
        self.begin(inside)
        yield
        self.jump(behind)
        self.begin(behind)

    @contextmanager
    def loop(self, count: int | str, start: int = 0) -> Iterator[str]:
        """A loop from `start` to `count` - 1, a number or register, at least once;
        yields the index's register, an i64."""
        if count == start + 1:
            yield str(start)
            return
        before, head, latch = self.block, self.name(), self.name()
        index, following = f"%{self.name()}", f"%{self.name()}"
        self.jump(head)
        self.begin(head)
        self.say(f"{index} = phi i64 [{start}, %{before}], [{following}, %{latch}]")
        yield index
        self.jump(latch)
        self.begin(latch)
        self.say(f"{following} = add nuw nsw i64 {index}, 1")
        behind = self.name()
        self.branch(self.let(f"icmp ult i64 {following}, {count}"), head, behind)
        self.begin(behind)

    def function(self, head: str) -> str:
        """The text of the function, `head` being `void @name(...)`."""
        body = "\n".join(["entry:", *self.slots, *self.lines])
        return f"define internal {head} alwaysinline {{\n{body}\n}}\n"
