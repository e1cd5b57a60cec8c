# SPDX-License-Identifier: Apache-2.0
"""Seam on `vllm/v1/spec_decode/dynamic/utils.py`.

Why: the base asks the user which draft length fits which batch size. CUDA graphs are
    captured for the lengths that its lookup names.
How: for "auto" the lookup names every length that the engine may choose.
Upstream: "[Spec Decode] Choose the draft length by measured pass times".
Until: upstream takes `num_speculative_tokens_per_batch_size="auto"`.
"""

from vllm._upstream import stand_on
from vllm.config.draft_length import AUTO, covering_lookup

upstream = stand_on(__name__)


def build_dynamic_sd_schedule_lookup(
    num_speculative_tokens_per_batch_size: object,
    vllm_max_batch_size: int,
    vllm_num_speculative_tokens: int,
) -> list[int]:
    """Draft length by batch size; see the base's function of this name."""
    if num_speculative_tokens_per_batch_size == AUTO:
        return covering_lookup(vllm_max_batch_size, vllm_num_speculative_tokens)
    return upstream.build_dynamic_sd_schedule_lookup(
        num_speculative_tokens_per_batch_size,
        vllm_max_batch_size,
        vllm_num_speculative_tokens,
    )
