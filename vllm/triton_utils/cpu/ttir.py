# SPDX-License-Identifier: Apache-2.0
"""A kernel in Triton's own intermediate representation (TTIR), as plain data.

Triton's front end, which needs neither a GPU nor a backend, checks types, inlines most
functions and folds constants. What is left is some eighty operations, parsed here from
MLIR text: https://mlir.llvm.org/docs/LangRef.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

NAME = r"%[\w$.\-]+(?:#\d+)?"
TYPE = r"(tensor<(?:\d+x)+)?(!tt\.ptr<(\w+)[^>]*>|[a-z]+\d+|index)"
SYMBOL = r'@("[^"]*"|[\w.$\-]+)'
HEAD = re.compile(rf'(?:({NAME})(?::(\d+))? = )?"?([a-z_]+\.[\w.]+)"?(.*)')


class Type(NamedTuple):
    """Type and shape of a value.

    Attributes:
        element: type of its elements, such as "i32", "bf16" or "ptr".
        shape: () is a scalar.
        pointee: type that a pointer points to.
    """

    element: str
    shape: tuple[int, ...] = ()
    pointee: str = ""

    @property
    def size(self) -> int:
        return prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Size of an element in memory, where a boolean takes one byte."""
        bits = "64" if self.element in ("ptr", "index") else self.element.lstrip("bfi")
        return (int(bits) + 7) // 8


@dataclass
class Operation:
    """`text` is all that follows the name, except types, after the last colon."""

    name: str
    results: list[str]
    text: str
    types: str
    regions: list["Region"] = field(default_factory=list)

    @property
    def operands(self) -> list[str]:
        return re.findall(NAME, self.text)

    @property
    def operand_types(self) -> list[Type]:
        return parse_types(re.split(r" -> | to ", self.types)[0])

    @property
    def result_types(self) -> list[Type]:
        return parse_types(re.split(r" -> | to ", self.types)[-1])

    def attribute(self, name: str) -> str:
        """The value as text; empty if there is none."""
        value = r'array<i\d+: ([^>]*)>|"([^"]*)"|([\w-]+)'
        found = re.search(rf"\b{name} = (?:{value})", self.text)
        return next(filter(None, found.groups()), "") if found else ""


@dataclass
class Block:
    label: str
    arguments: dict[str, Type]
    operations: list[Operation] = field(default_factory=list)


Region = list[Block]


def parse_types(text: str) -> list[Type]:
    return [
        Type(
            "ptr" if pointee else element,
            tuple(map(int, re.findall(r"\d+", shape))),
            pointee,
        )
        for shape, element, pointee in re.findall(TYPE, text)
    ]


def parse_arguments(text: str) -> dict[str, Type]:
    """Parses `%a: i32, %b: tensor<8xi32>`."""
    found = re.findall(rf"({NAME}): ((?:tensor<[^%]*>+|!tt\.ptr<\w+[^>]*>|\w+))", text)
    return {name: parse_types(kind)[0] for name, kind in found}


def parse_module(text: str) -> tuple[Region, dict[str, Region]]:
    """The bodies of the kernel, and by name of the functions that it calls; arguments
    of a body's first block are the function's."""
    lines, kernel, functions = iter(text.splitlines()), None, {}
    for line in lines:
        if "tt.func " not in line:
            continue
        body, _ = _parse_region(lines)
        body[0].arguments = parse_arguments(line)
        if "tt.func public" in line:
            kernel = body
        else:
            functions[symbol(line)] = body
    return kernel, functions


def symbol(text: str) -> str:
    """The first name of a function in a text."""
    return re.search(SYMBOL, text).group(1)


def _parse_region(lines: Iterator[str]) -> tuple[Region, str]:
    """A region, and the text after its closing brace."""
    region = [Block("", {})]
    for line in map(str.strip, lines):
        if line.startswith("}"):
            return region, line[1:].strip()
        if line.startswith("^"):
            label = re.match(r"\^(\w+)", line).group(1)
            block = Block(label, parse_arguments(line.split("//")[0]))
            region = [*region, block] if region[0].operations else [block]
        elif line:
            region[-1].operations.append(_parse_operation(line, lines))
    raise ValueError("a region does not end")


def _parse_operation(line: str, lines: Iterator[str]) -> Operation:
    first, count, name, rest = HEAD.fullmatch(line).groups()
    results = [first] if first else []
    if count:
        results = [f"{first}#{i}" for i in range(int(count))]
    regions, is_open = [], rest.endswith("{")
    while is_open:
        region, tail = _parse_region(lines)
        regions.append(region)
        is_open = tail.endswith("{")
        if not is_open and name.startswith("tt."):
            rest += tail
    text, types = rest, ""
    if " : " in rest and not name.startswith("cf."):
        text, _, types = rest.rpartition(" : ")
    return Operation(name, results, text, types, regions)
