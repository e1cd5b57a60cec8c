# SPDX-License-Identifier: Apache-2.0
"""Whether Triton's kernels are compiled for this CPU, for which Triton has no backend.

HAS_TRITON stays false: everything but Model Runner V2 runs as in vLLM on a CPU.
"""

from importlib.util import find_spec

from vllm.platforms import current_platform

COMPILED = False
if current_platform.is_cpu() and find_spec("triton") is not None:
    from triton import knobs
    from triton.backends import backends

    COMPILED = not knobs.runtime.interpret and "cpu" not in backends
    COMPILED &= all(map(find_spec, ("llvmlite", "vllm.triton_utils.cpu")))
