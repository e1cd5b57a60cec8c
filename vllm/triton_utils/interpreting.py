# SPDX-License-Identifier: Apache-2.0
"""Whether Triton's interpreter runs the kernels, which needs no backend of Triton's."""

from importlib.util import find_spec

from vllm.platforms import current_platform


def _is_interpreted() -> bool:
    if not current_platform.is_cpu() or find_spec("triton") is None:
        return False
    from triton import knobs

    return bool(knobs.runtime.interpret)


def _has_cpu_backend() -> bool:
    from triton.backends import backends

    return "cpu" in backends


# TRITON_INTERPRET=1 on a machine without a GPU.
INTERPRETED = _is_interpreted()
# There vLLM would turn Triton off.
LACKS_BACKEND = INTERPRETED and not _has_cpu_backend()
