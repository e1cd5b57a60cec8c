# SPDX-License-Identifier: Apache-2.0
"""Functions of a GPU's device library that Triton's interpreter lacks.

There they are stubs that return None. The interpreter runs plain Python, so a function
of Triton's own operations takes a stub's place.
"""

import triton.language as tl
from triton.language.extra import libdevice


def log1p(x):
    """log(1 + x); a series where 1 + x would round x off."""
    return tl.where(tl.abs(x) < 1e-3, x - x * x / 2 + x * x * x / 3, tl.log(1 + x))


def install() -> None:
    libdevice.log1p = log1p
