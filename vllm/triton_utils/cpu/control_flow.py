# SPDX-License-Identifier: Apache-2.0
"""Loops, branches, jumps and calls. Values that they carry are in memory, which LLVM's
optimizer turns into registers where it can."""

import re

from .arithmetic import llvm_type
from .ttir import NAME, Operation, Region, Type, parse_types, symbol
from .values import Kernel


def _say(k: Kernel, region: Region, memory: list[str]) -> None:
    """Emits a region of one block, which passes its results on in memory."""
    outer, k.known = k.known, {}
    for op in region[0].operations:
        if op.name == "scf.yield":
            k.copy(op.operands, memory)
        else:
            k.run(op)
    k.known = outer


def _if(k: Kernel, op: Operation) -> None:
    kinds = parse_types(op.text.partition(" -> ")[2])
    memory = [k.keep(kind) for kind in kinds]
    labels = [k.b.name() for _ in op.regions] + [k.b.name()]
    k.b.branch(k.element(op.operands[0], "0"), *labels[:2])
    for label, region in zip(labels, op.regions, strict=False):
        k.b.begin(label)
        _say(k, region, memory)
        k.b.jump(labels[-1])
    k.b.begin(labels[-1])
    k.define_kept(op.results, kinds, memory)


def _carried(k: Kernel, text: str) -> tuple[list[str], list[Type], list[str]]:
    """Stores the values of `%name = %first, ...`; returns names, types and memory."""
    pairs = re.findall(rf"({NAME}) = ({NAME})", text)
    names, given = [name for name, _ in pairs], [first for _, first in pairs]
    kinds = [k.types[name] for name in given]
    memory = [k.keep(kind) for kind in kinds]
    k.copy(given, memory)
    return names, kinds, memory


def _for(k: Kernel, op: Operation) -> None:
    bounds, _, carried = op.text.partition(" iter_args(")
    compare = "ult" if bounds.strip().startswith("unsigned") else "slt"
    counter, low, high, step = re.findall(NAME, bounds)
    (kind,) = parse_types(op.types)
    width = llvm_type(kind.element)
    names, kinds, memory = _carried(k, carried)
    count = k.keep(kind)
    k.store(k.element(low, "0"), count, kind)
    test, body, behind = k.b.name(), k.b.name(), k.b.name()
    k.b.jump(test)
    k.b.begin(test)
    now = k.load(count, kind)
    more = k.b.let(f"icmp {compare} {width} {now}, {k.element(high, '0')}")
    k.b.branch(more, body, behind)
    k.b.begin(body)
    k.define(counter, kind, now)
    k.define_kept(names, kinds, memory)
    _say(k, op.regions[0], memory)
    k.store(k.b.let(f"add {width} {now}, {k.element(step, '0')}"), count, kind)
    k.b.jump(test)
    k.b.begin(behind)
    k.define_kept(op.results, kinds, memory)


def _while(k: Kernel, op: Operation) -> None:
    """The first region computes the condition, and passes values to the second."""
    names, kinds, memory = _carried(k, op.text)
    ((first,), (second,)) = op.regions
    test, body, behind = k.b.name(), k.b.name(), k.b.name()
    k.b.jump(test)
    k.b.begin(test)
    k.define_kept(names, kinds, memory)
    outer, k.known = k.known, {}
    *before, last = first.operations
    for operation in before:
        k.run(operation)
    condition, *passed = last.operands
    kinds = [k.types[name] for name in passed]
    handed = [k.keep(kind) for kind in kinds]
    k.copy(passed, handed)
    k.b.branch(k.element(condition, "0"), body, behind)
    k.known = outer
    k.b.begin(body)
    k.define_kept(list(second.arguments), kinds, handed)
    _say(k, [second], memory)
    k.b.jump(test)
    k.b.begin(behind)
    k.define_kept(op.results, kinds, handed)


def _jump(k: Kernel, op: Operation) -> None:
    k.b.jump(_enter(k, op.text))


def _branch(k: Kernel, op: Operation) -> None:
    condition, *_ = op.operands
    labels = k.b.name(), k.b.name()
    k.b.branch(k.element(condition, "0"), *labels)
    targets = re.findall(r"\^\w+(?:\([^)]*\))?", op.text)
    for label, target in zip(labels, targets, strict=True):
        k.b.begin(label)
        k.b.jump(_enter(k, target))


def _enter(k: Kernel, target: str) -> str:
    """Stores a block's arguments, given `^label(%a : i32)`; returns its label."""
    label, memory = k.labels[re.search(r"\^(\w+)", target).group(1)]
    outer, k.known = k.known, {}
    k.copy(re.findall(NAME, target), memory)
    k.known = outer
    return label


def _return(k: Kernel, op: Operation) -> None:
    if k.exit is None:
        k.b.say("ret void")
        return
    label, memory = k.exit
    k.copy(op.operands, memory)
    k.b.jump(label)


def _call(k: Kernel, op: Operation) -> None:
    """Emits the body of the called function in place of the call.

    Triton inlines functions too, but not one that returns early, has thus several
    blocks, and is called in a loop or branch: MLIR's have one block.
    """
    body = k.functions[symbol(op.text)]
    given = [(k.types[name], k.fixed(name)) for name in op.operands]
    memory = [k.keep(kind) for kind in op.result_types]
    behind = k.b.name()
    with k.scope((behind, memory)):
        for name, (kind, value) in zip(body[0].arguments, given, strict=True):
            k.define(name, kind, value)
        say_blocks(k, body)
    k.b.begin(behind)
    k.define_kept(op.results, op.result_types, memory)


def say_blocks(k: Kernel, body: Region) -> None:
    """Emits a function's body; its first block's arguments are already defined."""
    for block in body[1:]:
        memory = [k.keep(kind) for kind in block.arguments.values()]
        k.labels[block.label] = k.b.name(), memory
    for block in body:
        if block.label in k.labels:
            label, memory = k.labels[block.label]
            k.b.begin(label)
            k.known = {}
            kinds = list(block.arguments.values())
            k.define_kept(list(block.arguments), kinds, memory)
        for op in block.operations:
            k.run(op)


CONTROL_FLOW = {
    "cf.br": _jump,
    "cf.cond_br": _branch,
    "scf.for": _for,
    "scf.if": _if,
    "scf.while": _while,
    "tt.call": _call,
    "tt.return": _return,
}
