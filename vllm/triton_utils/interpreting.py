# SPDX-License-Identifier: Apache-2.0
"""How Triton's kernels run on a CPU, for which Triton itself has no backend."""

from importlib.util import find_spec

from vllm.platforms import current_platform


def _is_on_cpu() -> bool:
    return current_platform.is_cpu() and find_spec("triton") is not None


def _is_interpreted() -> bool:
    if not _is_on_cpu():
        return False
    from triton import knobs

    return bool(knobs.runtime.interpret)


def _lacks_backend() -> bool:
    if not _is_on_cpu():
        return False
    from triton.backends import backends

    return "cpu" not in backends


def is_compiled() -> bool:
    """Whether kernels are compiled by `triton_utils/cpu`. HAS_TRITON stays false:
    everything but Model Runner V2 runs as in vLLM on a CPU."""
    if _is_interpreted() or not _lacks_backend():
        return False
    return all(map(find_spec, ("llvmlite", "vllm.triton_utils.cpu")))


# Kernels run in Triton's interpreter, since the user has set TRITON_INTERPRET=1.
INTERPRETED = _is_interpreted()
# In this case vLLM would turn Triton off.
LACKS_BACKEND = INTERPRETED and _lacks_backend()
COMPILED = is_compiled()
