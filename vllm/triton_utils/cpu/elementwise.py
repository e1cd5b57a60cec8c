# SPDX-License-Identifier: Apache-2.0
"""TTIR's elementwise operations."""

from collections.abc import Callable

from . import arithmetic as a
from .functions import vectorized
from .ttir import Operation, Type
from .values import Kernel

INTEGERS = {
    "addi": "add", "subi": "sub", "muli": "mul", "andi": "and", "ori": "or",
    "xori": "xor", "shli": "shl", "shrsi": "ashr", "shrui": "lshr",
}  # fmt: skip
FLOATS = {"addf": "fadd", "subf": "fsub", "mulf": "fmul", "divf": "fdiv"}
DIVISIONS = {"divsi": "sdiv", "remsi": "srem", "divui": "udiv", "remui": "urem"}
CONVERSIONS = {
    "extsi": "sext", "extui": "zext", "trunci": "trunc", "sitofp": "sitofp",
    "uitofp": "uitofp", "fptosi": "fptosi", "bitcast": "bitcast",
}  # fmt: skip
INTRINSICS = {
    "arith.maxsi": "smax", "arith.minsi": "smin", "arith.maxui": "umax",
    "arith.minui": "umin", "arith.maxnumf": "maxnum", "arith.minnumf": "minnum",
    "arith.maximumf": "maximum", "arith.minimumf": "minimum", "math.absf": "fabs",
    "math.floor": "floor", "math.sqrt": "sqrt", "tt.precise_sqrt": "sqrt",
}  # fmt: skip
FUNCTIONS = ("exp", "exp2", "log", "log2")

INSTRUCTIONS: dict[str, a.Instruction] = {
    **{f"arith.{name}": a.binary(to) for name, to in (INTEGERS | FLOATS).items()},
    **{f"arith.{name}": a.divide(to) for name, to in DIVISIONS.items()},
    **{f"arith.{name}": a.convert(to) for name, to in CONVERSIONS.items()},
    **{name: a.intrinsic(to) for name, to in INTRINSICS.items()},
    **{f"math.{name}": a.function(name) for name in FUNCTIONS},
    **{f"math.{name}": vectorized(name) for name in ("exp", "log")},
    "arith.cmpf": a.compare("fcmp"),
    "arith.cmpi": a.compare("icmp"),
    "arith.extf": a.convert_float,
    "arith.negf": a.negate,
    "arith.select": a.select,
    "arith.truncf": a.convert_float,
    "math.absi": a.intrinsic("abs", "false"),
    "tt.addptr": a.advance,
    "tt.bitcast": a.convert("bitcast"),
    "tt.extern_elementwise": a.external,
    "tt.int_to_ptr": a.convert("inttoptr"),
    "tt.mulhiui": a.high_product,
    "tt.precise_divf": a.binary("fdiv"),
}
# Too expensive to be repeated at each use of the result.
DEAR = {f"math.{name}" for name in FUNCTIONS} | {"tt.extern_elementwise"}


def _result_type(op: Operation) -> Type:
    if op.name.startswith("arith.cmp"):
        return op.result_types[0]._replace(element="i1")
    return op.operand_types[0] if op.name == "tt.addptr" else op.result_types[-1]


def _elementwise(instruction: a.Instruction) -> Callable[[Kernel, Operation], None]:
    def say(k: Kernel, op: Operation) -> None:
        names, (name,) = op.operands, op.results
        kind, source = _result_type(op), k.types[names[0]].element

        def rule(index: str) -> str:
            given = k.elements(names, index)
            return instruction(k.b, op, given, source, kind.element)

        if all(map(k.is_uniform, names)):
            k.define(name, kind, rule("0"))
            return
        k.define(name, kind, rule)
        if op.name in DEAR:
            k.materialize(name)

    return say


ELEMENTWISE = {name: _elementwise(how) for name, how in INSTRUCTIONS.items()}
