# SPDX-License-Identifier: Apache-2.0
"""Operations that read and write memory, under masks."""

from .arithmetic import constant, llvm_type
from .ttir import Operation, Type
from .values import Kernel, Unsupported

ATOMICS = ("add", "fadd", "and", "or", "xor", "exch")


def _load(k: Kernel, op: Operation) -> None:
    """Masked-out elements are zero unless the kernel gives another value."""
    pointer, *masks = op.operands
    kind = Type(op.operand_types[0].pointee, op.operand_types[0].shape)
    memory = k.keep(kind)

    def body(index: str) -> None:
        mask = k.element(masks[0], index) if masks else None
        if masks:
            zero = "null" if kind.element == "ptr" else constant("0", kind.element)
            other = k.element(masks[1], index) if masks[1:] else zero
            k.store(other, memory, kind, index)
        with k.b.when(mask):
            value = k.load(k.element(pointer, index), Type(kind.element))
            k.store(value, memory, kind, index)

    k.over(kind.size, body)
    k.define_kept(op.results, [kind], [memory])


def _store(k: Kernel, op: Operation) -> None:
    pointer, value, *masks = op.operands
    kind = Type(op.operand_types[0].pointee)

    def body(index: str) -> None:
        mask = k.element(masks[0], index) if masks else None
        address, register = k.elements([pointer, value], index)
        with k.b.when(mask):
            k.store(register, address, kind)

    k.over(op.operand_types[0].size, body)


def _atomic(k: Kernel, op: Operation) -> None:
    """Plain loads and stores suffice, since programs run one after the other."""
    how = op.text.split(",")[0].strip()
    if how not in ATOMICS:
        raise Unsupported(f"{op.name} {how}")
    pointer, value, *masks = op.operands
    kind = op.result_types[0]
    before = k.keep(kind)

    def body(index: str) -> None:
        mask = k.element(masks[0], index) if masks else None
        address, new = k.elements([pointer, value], index)
        with k.b.when(mask):
            was = k.load(address, Type(kind.element))
            k.store(was, before, kind, index)
            if how != "exch":
                new = k.b.let(f"{how} {llvm_type(kind.element)} {was}, {new}")
            k.store(new, address, Type(kind.element))

    k.over(kind.size, body)
    k.define_kept(op.results, [kind], [before])


def _nothing(k: Kernel, op: Operation) -> None:
    pass


MEMORY = {
    "gpu.barrier": _nothing,
    "llvm.intr.assume": _nothing,
    "tt.atomic_rmw": _atomic,
    "tt.load": _load,
    "tt.store": _store,
    "ttg.barrier": _nothing,
}
