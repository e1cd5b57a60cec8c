# SPDX-License-Identifier: Apache-2.0
"""A kernel that writes past the end of a tensor: compute-sanitizer must say so.

Its name is one that the filter of `test_sanitizer.py` matches, so that one that matches
nothing, or a sanitizer that looks at nothing, is found out.
"""

import torch

from vllm.triton_utils import tl, triton

SIZE = 64


@triton.jit
def _prepare_inputs_planted(out, SIZE: tl.constexpr):
    at = tl.arange(0, 2 * SIZE)
    tl.store(out + at, at)


def main() -> None:
    out = torch.empty(SIZE, dtype=torch.int32, device="cuda")
    _prepare_inputs_planted[(1,)](out, SIZE)
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
