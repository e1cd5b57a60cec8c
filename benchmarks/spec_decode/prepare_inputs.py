# SPDX-License-Identifier: Apache-2.0
"""The input kernel: from a verified step to a draft batch; see README.md.

Decode batches, and batches of a long prompt beside many decodes, which are compared
with the time that the two take alone.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.spec_decode.models import MODES, PARALLEL
from benchmarks.spec_decode.run import Run, describe_device
from vllm.v1.worker.gpu.block_table import BlockTables
from vllm.v1.worker.gpu.spec_decode.unified.buffers import DraftBuffers
from vllm.v1.worker.gpu.spec_decode.unified.inputs import (
    HiddenRows,
    VerifiedBatch,
    prepare_inputs,
)
from vllm.v1.worker.gpu.spec_decode.unified.layout import DraftLayout

if not torch.cuda.is_available():
    import vllm.v1.worker.cpu.shm  # noqa: F401  (what Runner V2 needs on a CPU)

BLOCK_SIZE, CONTEXT = 16, 512  # tokens of a KV block; positions before the step
MAX_NUM_REQS = 256
DRAFTING = [mode for mode in MODES if mode != "none"]
EAGLE = ("eagle3", "peagle")
# States of a token that a drafter is fed: three layers', or those that PARD-2 projects.
NUM_SOURCES = {"pard2": 1, "eagle3": 3, "peagle": 3}
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
AHEAD_CYCLES = 4_000_000  # keeps the device busy while a launch is on its way


def layout_of(mode: str, num_drafts: int) -> DraftLayout:
    width = num_drafts if mode in PARALLEL else 1
    return DraftLayout(num_drafts, int(mode in EAGLE), width)


def first_pass(
    layout: DraftLayout,
    query_lens: list[int],
    max_num_reqs: int,
    num_sources: int = 0,
    hidden_size: int = 0,
    dtype: torch.dtype = torch.bfloat16,
) -> dict[str, Any]:
    """Keyword arguments of `prepare_inputs`.

    Args:
        query_lens: target tokens of each request.
        max_num_reqs: the most requests of the engine.
        num_sources: hidden states of a token that are fed, side by side.
        hidden_size: of one of them.
    """
    num_tokens, num_reqs = sum(query_lens), len(query_lens)
    buffers = DraftBuffers(layout, num_tokens, max_num_reqs, DEVICE)
    buffers.allocate_kv_groups(1)
    limit = CONTEXT + max(query_lens) + layout.num_room_tokens
    width = -(-limit // BLOCK_SIZE)
    tables = BlockTables([BLOCK_SIZE], max_num_reqs, num_tokens, [width], DEVICE)
    ids = torch.arange(1, max_num_reqs * width + 1, dtype=torch.int32)
    tables.block_tables[0].gpu.copy_(ids.view(max_num_reqs, width))
    tables.num_blocks.np[:] = width
    tables.num_blocks.copy_to_uva()
    hidden = None
    if num_sources:
        shape = num_sources, num_tokens, hidden_size
        fed = torch.randn(shape, dtype=dtype, device=DEVICE).unbind()
        # What masks are fed, or what KV blocks keep of the token before the step.
        kept = 2 * (1 + max_num_reqs * width)
        shape = (kept, num_sources * hidden_size)[layout.token_shift :]
        positions = torch.full((kept,), CONTEXT - 1, device=DEVICE)
        hidden = HiddenRows(fed, fed[0].new_ones(shape))
        if not layout.token_shift:
            hidden = hidden._replace(positions=positions)
    return {
        "source": verified(layout, query_lens, max_num_reqs),
        "layout": layout,
        "buffers": buffers,
        "block_tables": tables,
        "num_samples": layout.parallel_width,
        "num_padded_tokens": num_tokens + num_reqs * layout.num_extra_slots,
        "limit": limit,
        "hidden": hidden,
    }


def verified(
    layout: DraftLayout, query_lens: list[int], max_num_reqs: int
) -> VerifiedBatch:
    """Of K + 1 tokens or fewer half are rejected; of more, a prompt, none."""
    lens = torch.tensor(query_lens, dtype=torch.int32)
    is_decode = lens <= layout.num_speculative_tokens + 1
    rejected = torch.where(is_decode, lens // 2, 0)
    positions = torch.cat([CONTEXT + torch.arange(q) for q in query_lens])
    states = torch.arange(max_num_reqs)
    batch = VerifiedBatch(
        input_ids=torch.randint(10, 1000, positions.shape, dtype=torch.int32),
        positions=positions,
        query_start_loc=torch.cat([lens.new_zeros(1), lens.cumsum(0)]).int(),
        idx_mapping=states[: len(lens)],
        num_sampled=lens - rejected,
        num_rejected=rejected,
        last_sampled=states[:, None] + 10,
        next_prefill_tokens=states.int(),
        temperature=torch.zeros(max_num_reqs),
        seeds=states,
    )
    return VerifiedBatch(*(tensor.to(DEVICE) for tensor in batch))


def measure(call: Callable[[], None], repeats: int) -> dict[str, float]:
    """Device time back to back, and what launching costs the host, both in seconds."""
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
    """(device, host) seconds of a call behind other work."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(AHEAD_CYCLES)
    begin.record()
    host_s = _timed(call)
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1e3, host_s


def measure_batch(
    mode: str, k: int, query_lens: list[int], args: argparse.Namespace
) -> dict[str, float]:
    """A batch of requests with so many target tokens each."""
    states = (NUM_SOURCES[mode], args.hidden_size) if mode in NUM_SOURCES else ()
    most = max(MAX_NUM_REQS, len(query_lens))
    given = first_pass(layout_of(mode, k), query_lens, most, *states)
    return measure(partial(prepare_inputs, **given), args.repeats)


def measure_all(args: argparse.Namespace) -> Iterator[tuple[str, dict[str, float]]]:
    """Decodes; then a prompt beside decodes, with its time to that of both alone."""
    modes, lengths = args.modes, args.num_speculative_tokens
    for n, k, mode in product(args.batch_size, lengths, modes):
        yield f"{mode}/K{k}/n{n}", measure_batch(mode, k, [k + 1] * n, args)
    mixed = product(modes, lengths, args.mixed_decodes, args.mixed_prompt)
    for mode, k, n, prompt in mixed:
        decodes = [k + 1] * n
        found, *alone = [
            measure_batch(mode, k, lens, args)
            for lens in ([prompt, *decodes], [prompt], decodes)
        ]
        clock = min(found)  # device_s, where there is a device
        found["to_both_alone"] = found[clock] / sum(part[clock] for part in alone)
        yield f"{mode}/K{k}/n{n}/p{prompt}", found


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--modes", nargs="+", choices=DRAFTING, default=DRAFTING)
    add("--batch-size", type=int, nargs="+", default=[1, 8, 32, 64, 256])
    add("--num-speculative-tokens", type=int, nargs="+", default=[3, 7, 11])
    add("--hidden-size", type=int, default=4096)
    add("--mixed-decodes", type=int, nargs="*", default=[63, 255])
    add("--mixed-prompt", type=int, nargs="*", default=[2048, 8192])
    add("--repeats", type=int, default=50)
    add("--output", type=Path, help="results file; in results/<gpu>/ by default")
    return parser.parse_args()


def main() -> None:
    args = parse()
    run = Run("prepare_inputs", describe_device(), args.output)
    for key, found in measure_all(args):
        run.record("measurements", key, found)
        run.say(f"{key}: {found}")


if __name__ == "__main__":
    main()
