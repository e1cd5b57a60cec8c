# SPDX-License-Identifier: Apache-2.0
"""The input kernel: from a verified decode batch to a draft batch; see README.md."""

import argparse
import time
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.spec_decode.models import MODES, PARALLEL
from benchmarks.spec_decode.run import Run, describe_device
from tests.v1.worker.gpu.spec_decode.batches import (
    DEVICE,
    block_tables,
    int32,
    prepare_inputs,
    verified_batch,
)
from vllm.v1.worker.gpu.spec_decode.unified.inputs import DraftInputs, HiddenRows
from vllm.v1.worker.gpu.spec_decode.unified.layout import DraftLayout

if not torch.cuda.is_available():
    import vllm.v1.worker.cpu.shm  # noqa: F401  (what Runner V2 needs on a CPU)

BLOCK_SIZE, CONTEXT = 16, 512  # tokens of a KV block; positions before the step
MAX_NUM_REQS = 256
DRAFTING = [mode for mode in MODES if mode != "none"]
EAGLE = ("eagle3", "peagle")
# Hidden states per token that a drafter is fed: of three layers, or PARD-2's projected
# ones.
NUM_SOURCES = {"pard2": 1, "eagle3": 3, "peagle": 3}
AHEAD_CYCLES = 4_000_000  # keeps the device busy while a launch is queued


def first_pass(mode: str, k: int, num_reqs: int, size: int) -> dict[str, Any]:
    """Keyword arguments of `prepare_inputs`; half the tokens are rejected.

    Args:
        size: of a hidden state that is fed to the drafter.
    """
    layout = DraftLayout(k, int(mode in EAGLE), k if mode in PARALLEL else 1)
    query_lens, num_tokens = [k + 1] * num_reqs, num_reqs * (k + 1)
    max_num_reqs = max(MAX_NUM_REQS, num_reqs)
    buffers = DraftInputs(layout, num_tokens, max_num_reqs, DEVICE)
    buffers.allocate_kv_groups(1)
    limit = CONTEXT + k + 1 + layout.num_room_tokens
    width = -(-limit // BLOCK_SIZE)
    tables = block_tables([0] * width, max_num_reqs)
    blocks = int32(range(1, max_num_reqs * width + 1))
    tables.block_tables[0].gpu.copy_(blocks.view(max_num_reqs, width))
    rejected = int32([(k + 1) // 2] * num_reqs)
    return {
        "source": verified_batch(
            query_lens,
            [CONTEXT] * num_reqs,
            max_num_reqs,
            num_sampled=int32(query_lens) - rejected,
            num_rejected=rejected,
        ),
        "layout": layout,
        "buffers": buffers,
        "block_tables": tables,
        "num_samples": layout.parallel_width,
        "num_padded_tokens": num_tokens + num_reqs * layout.num_extra_slots,
        "limit": limit,
        "hidden": hidden_rows(mode, num_tokens, size, 2 * (1 + len(blocks))),
    }


def hidden_rows(mode: str, num_tokens: int, size: int, kept: int) -> HiddenRows | None:
    """The target's hidden states, and what masks are fed (EAGLE), or `kept` rows of
    kept states (PARD-2)."""
    if mode not in NUM_SOURCES:
        return None
    shape = NUM_SOURCES[mode], num_tokens, size
    fed = torch.randn(shape, dtype=torch.bfloat16, device=DEVICE).unbind()
    if mode in EAGLE:
        return HiddenRows(fed, fed[0].new_ones(len(fed) * size))
    positions = torch.full((kept,), CONTEXT - 1, device=DEVICE)
    return HiddenRows(fed, fed[0].new_ones(kept, size), positions)


def measure(call: Callable[[], None], repeats: int) -> dict[str, float]:
    """Median device time without host gaps, and host time of a launch, in seconds."""
    for _ in range(3):
        call()
    if not torch.cuda.is_available():
        return {"host_s": median(_timed(call) for _ in range(repeats))}
    device_s, host_s = zip(*(_queued(call) for _ in range(repeats)), strict=True)
    return {"device_s": median(device_s), "host_s": median(host_s)}


def _timed(call: Callable[[], None]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def _queued(call: Callable[[], None]) -> tuple[float, float]:
    """(device, host) seconds of a call that is queued behind other work."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(AHEAD_CYCLES)
    begin.record()
    host_s = _timed(call)
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1e3, host_s


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--modes", nargs="+", choices=DRAFTING, default=DRAFTING)
    add("--batch-size", type=int, nargs="+", default=[1, 8, 32, 64, 256])
    add("--num-speculative-tokens", type=int, nargs="+", default=[3, 7, 11])
    add("--hidden-size", type=int, default=4096)
    add("--repeats", type=int, default=50)
    add("--output", type=Path, help="results file; in results/<gpu>/ by default")
    return parser.parse_args()


def main() -> None:
    args = parse()
    run = Run("prepare_inputs", describe_device(), args.output)
    points = product(args.batch_size, args.num_speculative_tokens, args.modes)
    for num_reqs, k, mode in points:
        given = first_pass(mode, k, num_reqs, args.hidden_size)
        found = measure(partial(prepare_inputs, **given), args.repeats)
        key = f"{mode}/K{k}/n{num_reqs}"
        run.record("measurements", key, found)
        run.say(f"{key}: {found}")


if __name__ == "__main__":
    main()
