# SPDX-License-Identifier: Apache-2.0
"""exp and log of float32 in LLVM's instructions.

LLVM vectorizes loops with these; with the C library's functions, which take one number
at a time, sampling tokens takes several times as long. An element's result does not
depend on the loop that it is computed in.

Both reduce the argument by multiples of ln 2, in two parts (Cody and Waite, 1980), and
evaluate polynomials with the coefficients of the Cephes library (Moshier,
netlib.org/cephes; expf.c and logf.c). Results are within 1 unit in the last place.
"""

from functools import partialmethod

from .arithmetic import Instruction, constant, function, in_float32
from .builder import Builder
from .ttir import Operation

LOG2_E = 1.4426950408889634
# ln 2: the first part has few bits, so that its multiples are exact.
LN2_HIGH, LN2_LOW = 0.693359375, -2.12194440e-4
EXP = (
    1.9875691500e-4,
    1.3981999507e-3,
    8.3334519073e-3,
    4.1665795894e-2,
    1.6666665459e-1,
    5.0000001201e-1,
)
LOG = (
    7.0376836292e-2,
    -1.1514610310e-1,
    1.1676998740e-1,
    -1.2420140846e-1,
    1.4249322787e-1,
    -1.6668057665e-1,
    2.0000714765e-1,
    -2.4999993993e-1,
    3.3333331174e-1,
)
# Beyond these exp is 0 or infinite.
LEAST, MOST = -104.0, 89.0
# A float32 of this size has no bits for fractions: adding it rounds to an integer,
# which the sum's lowest bits then hold.
ROUNDER, ROUNDER_BITS = 12582912.0, 0x4B400000
SQRT_HALF = 0.70710678118654752


class _Float32:
    """Arithmetic on registers of float32, and on numbers."""

    def __init__(self, b: Builder) -> None:
        self.b = b

    def number(self, value: float | str) -> str:
        return value if isinstance(value, str) else constant(str(value), "f32")

    def _binary(self, name: str, x: float | str, y: float | str) -> str:
        return self.b.let(f"{name} float {self.number(x)}, {self.number(y)}")

    add = partialmethod(_binary, "fadd")
    subtract = partialmethod(_binary, "fsub")
    multiply = partialmethod(_binary, "fmul")

    def polynomial(self, x: str, coefficients: tuple[float, ...]) -> str:
        """Horner's rule, from the coefficient of the highest power on."""
        first, *rest = coefficients
        y = self.number(first)
        for coefficient in rest:
            y = self.add(self.multiply(y, x), coefficient)
        return y

    def pick(
        self, test: str, x: str, y: float | str, then: float | str, other: float | str
    ) -> str:
        """`then` where the comparison of x and y holds, else `other`."""
        holds = self.b.let(f"fcmp {test} float {x}, {self.number(y)}")
        pair = f"float {self.number(then)}, float {self.number(other)}"
        return self.b.let(f"select i1 {holds}, {pair}")

    def bits(self, x: str) -> str:
        return self.b.let(f"bitcast float {x} to i32")

    def of_bits(self, bits: str) -> str:
        return self.b.let(f"bitcast i32 {bits} to float")

    def power_of_two(self, exponent: str) -> str:
        """2 ** exponent, an i32 from -126 to 127."""
        biased = self.b.let(f"add i32 {exponent}, 127")
        return self.of_bits(self.b.let(f"shl i32 {biased}, 23"))


def exp(b: Builder, x: str) -> str:
    f = _Float32(b)
    x = f.pick("olt", x, LEAST, LEAST, x)  # NaN stays
    x = f.pick("ogt", x, MOST, MOST, x)
    rounded = f.add(f.multiply(x, LOG2_E), ROUNDER)
    n = b.let(f"sub i32 {f.bits(rounded)}, {ROUNDER_BITS}")
    whole = f.subtract(rounded, ROUNDER)
    r = f.subtract(x, f.multiply(whole, LN2_HIGH))
    r = f.subtract(r, f.multiply(whole, LN2_LOW))
    y = f.multiply(f.polynomial(r, EXP), f.multiply(r, r))
    y = f.add(f.add(y, r), 1.0)
    # 2 ** n may be too large or too small for a float32, but its root is not.
    half = b.let(f"ashr i32 {n}, 1")
    other_half = b.let(f"sub i32 {n}, {half}")
    y = f.multiply(y, f.power_of_two(half))
    return f.multiply(y, f.power_of_two(other_half))


def log(b: Builder, x: str) -> str:
    f = _Float32(b)
    least_normal, scale = 2.0**-126, 2.0**25
    normal = f.pick("olt", x, least_normal, f.multiply(x, scale), x)
    exponent_of_scale = f.pick("olt", x, least_normal, -25.0, 0.0)
    bits = f.bits(normal)
    n = b.let(f"sub i32 {b.let(f'lshr i32 {bits}, 23')}, 126")
    fraction = b.let(f"or i32 {b.let(f'and i32 {bits}, 8388607')}, 1056964608")
    m = f.of_bits(fraction)  # from 0.5 to 1
    whole = f.add(b.let(f"sitofp i32 {n} to float"), exponent_of_scale)
    whole = f.pick("olt", m, SQRT_HALF, f.subtract(whole, 1.0), whole)
    m = f.pick("olt", m, SQRT_HALF, f.subtract(f.add(m, m), 1.0), f.subtract(m, 1.0))
    square = f.multiply(m, m)
    y = f.multiply(f.multiply(f.polynomial(m, LOG), m), square)
    y = f.add(y, f.multiply(whole, LN2_LOW))
    y = f.subtract(y, f.multiply(square, 0.5))
    y = f.add(f.add(m, y), f.multiply(whole, LN2_HIGH))
    y = f.pick("oeq", x, float("inf"), x, y)
    y = f.pick("oeq", x, 0.0, float("-inf"), y)
    return f.pick("ult", x, 0.0, float("nan"), y)  # NaN too


def vectorized(name: str) -> Instruction:
    """A function of float32 in instructions; of float64 the C library's."""
    short, library = {"exp": exp, "log": log}[name], function(name)

    @in_float32
    def say(b: Builder, op: Operation, x: list[str], kind: str, to: str) -> str:
        return short(b, *x) if kind == "f32" else library(b, op, x, kind, to)

    return say
