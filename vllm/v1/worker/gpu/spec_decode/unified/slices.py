# SPDX-License-Identifier: Apache-2.0
"""Slices of a batch whose logits are computed together, to bound their memory.

A drafter that samples K slots of each of R requests has R * K rows of logits: 2 GB for
1024 requests, 8 drafts and Llama 3's 128256 tokens in bfloat16. They are needed only
until a token is sampled from each row, and rows are independent.
"""

from collections.abc import Iterator

# Most bytes of logits at a time. With 128256 tokens in bfloat16 this is 2092 rows: a
# matmul of that size is compute-bound, so reading the lm_head again for each slice
# costs next to nothing.
MAX_LOGITS_BYTES = 512 << 20


def request_slices(num_reqs: int, logits_bytes: int) -> Iterator[slice]:
    """Slices of about equally many requests; one if the logits of all fit.

    They depend on the arguments alone, so the graph of a batch contains all its slices.

    Args:
        num_reqs: requests of the batch, padded ones included.
        logits_bytes: of all rows of one request.
    """
    most = max(MAX_LOGITS_BYTES // logits_bytes, 1)
    count = -(-num_reqs // most)
    for number in range(count):
        yield slice(num_reqs * number // count, num_reqs * (number + 1) // count)
