# SPDX-License-Identifier: Apache-2.0
"""How Triton's kernels run on a CPU, for which Triton itself has no backend.

Attributes:
    INTERPRETED: in Triton's interpreter, since the user has set TRITON_INTERPRET=1.
    LACKS_BACKEND: in this case vLLM would turn Triton off.
    COMPILED: compiled by `triton_utils/cpu`. HAS_TRITON stays false: everything but
        Model Runner V2 runs as in vLLM on a CPU.
"""

from importlib.util import find_spec

from vllm.platforms import current_platform

INTERPRETED = LACKS_BACKEND = COMPILED = False
if current_platform.is_cpu() and find_spec("triton") is not None:
    from triton import knobs
    from triton.backends import backends

    INTERPRETED = bool(knobs.runtime.interpret)
    LACKS_BACKEND = INTERPRETED and "cpu" not in backends
    if not INTERPRETED and "cpu" not in backends:
        COMPILED = all(map(find_spec, ("llvmlite", "vllm.triton_utils.cpu")))
