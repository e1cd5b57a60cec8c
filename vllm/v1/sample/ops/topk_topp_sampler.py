# SPDX-License-Identifier: Apache-2.0
"""Seam on `vllm/v1/sample/ops/topk_topp_sampler.py`.

Why: the base's top-k/top-p kernel uses integers that only compiled Triton turns into
    tensors; under the interpreter a request with `top_p` ends the engine.
How: under the interpreter this module samples as it does without Triton.
Upstream: "[Bugfix] Top-k/top-p kernel under TRITON_INTERPRET=1".
Until: the base's kernel runs under the interpreter.
"""

from vllm._upstream import stand_on
from vllm.triton_utils.importing import INTERPRETED

upstream = stand_on(__name__)
if INTERPRETED:
    upstream.HAS_TRITON = False
