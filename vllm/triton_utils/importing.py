# SPDX-License-Identifier: Apache-2.0
"""Seam on `vllm/triton_utils/importing.py`.

Why: on a CPU the base turns Triton off unless Triton has a `cpu` backend, although
    Triton's interpreter needs no backend. Runner V2, whose kernels are Triton
    kernels, can then not run on a machine without a GPU.
How: when the interpreter is asked for (TRITON_INTERPRET=1) on the CPU platform,
    `HAS_TRITON` stays true, and one log line says so in place of upstream's warning.
    What the interpreter lacks and kernels of the base use is put into it.
Upstream: "[CPU] Keep Triton enabled under TRITON_INTERPRET=1".
Until: upstream takes that change, or ships a Triton `cpu` backend.
"""

import logging
from importlib.util import find_spec

from vllm._upstream import stand_on
from vllm.logger import init_logger
from vllm.platforms import current_platform

logger = init_logger(__name__)


def _is_interpreted() -> bool:
    if not current_platform.is_cpu() or find_spec("triton") is None:
        return False
    from triton import knobs

    return bool(knobs.runtime.interpret)


INTERPRETED = _is_interpreted()
# Upstream would announce that it turns Triton off, which is about to be untrue.
logging.getLogger("vllm._upstream.triton_utils.importing").disabled = INTERPRETED

upstream = stand_on(__name__)

if INTERPRETED:
    from vllm.triton_utils.interpreted import install

    upstream.HAS_TRITON = True
    install()
    logger.info(
        "Triton kernels run under Triton's interpreter (TRITON_INTERPRET=1): right "
        "results, but slow. Unset it to run without Triton kernels."
    )
