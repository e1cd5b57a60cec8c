# SPDX-License-Identifier: Apache-2.0
"""Logits of the sampled slots of a pass, of some requests at a time.

A drafter that samples K slots of each of R requests has R * K rows of logits: 2 GB for
1024 requests, 8 drafts and Llama 3's 128256 tokens in bfloat16. They live as long as it
takes to draw a token of each row, and each row is drawn from alone.
"""

from collections.abc import Iterator

# Most bytes of logits at a time. At 128256 tokens in bfloat16 they are of 2092 rows:
# multiplying so many waits for arithmetic, so to read the lm_head again for each slice
# costs next to nothing.
MAX_LOGITS_BYTES = 512 << 20


def request_slices(num_reqs: int, logits_bytes: int) -> Iterator[slice]:
    """Slices of about equally many requests; one if the logits of all fit.

    They follow from the arguments alone, so a graph of a batch holds all its slices.

    Args:
        num_reqs: requests of the batch, padded ones included.
        logits_bytes: of all rows of one request.
    """
    most = max(MAX_LOGITS_BYTES // logits_bytes, 1)
    count = -(-num_reqs // most)
    for number in range(count):
        yield slice(num_reqs * number // count, num_reqs * (number + 1) // count)
