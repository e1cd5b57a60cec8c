# SPDX-License-Identifier: Apache-2.0
"""How Triton's kernels run on a CPU, for which Triton itself has no backend."""

from importlib.util import find_spec

from vllm.platforms import current_platform


def _lacks_backend() -> bool:
    if not current_platform.is_cpu() or find_spec("triton") is None:
        return False
    from triton.backends import backends

    return "cpu" not in backends


def _is_interpreted() -> bool:
    if not current_platform.is_cpu() or find_spec("triton") is None:
        return False
    from triton import knobs

    return bool(knobs.runtime.interpret)


# By Triton's interpreter, which the user asks for: TRITON_INTERPRET=1.
INTERPRETED = _is_interpreted()
# By `triton_utils/cpu`, which compiles them with the LLVM that Numba brings.
COMPILED = _lacks_backend() and not INTERPRETED and find_spec("llvmlite") is not None
# There vLLM would turn Triton off.
LACKS_BACKEND = _lacks_backend() and (INTERPRETED or COMPILED)
