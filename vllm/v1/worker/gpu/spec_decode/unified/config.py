# SPDX-License-Identifier: Apache-2.0
"""The drafter's own view of the engine's config.

A draft batch is wider than the target's. The drafter is therefore built with a token
budget and a compile range for its own widest batch, while the target's stay unchanged.
Both share one `static_forward_context`, where attention layers register.

With pipeline parallelism the last stage drafts, and has the whole draft model: vLLM
would split it like the target.

Tensor-parallel ranks split a draft model, or each has all of it if the user asks for
that (`draft_tensor_parallel_size: 1`). Then they compute the same drafts from the same
tokens, as they do with everything that vLLM does not split: expert routers, and
sampling. A draft pass then waits for no other rank; with a small model, waiting takes
most of the time.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from functools import partial

from vllm.config import VllmConfig
from vllm.config.compilation import CompilationMode, CUDAGraphMode
from vllm.distributed import parallel_state
from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup

from .layout import DraftLayout


def draft_lengths(vllm_config: VllmConfig) -> list[int]:
    """The numbers of drafts that a step may ask for, in ascending order."""
    spec = vllm_config.speculative_config
    most = spec.drafter.num_verified
    lengths = {0, most}  # 0: of a step that has no request which can use drafts
    if spec.uses_dynamic_speculative_decoding():
        by_batch_size = build_dynamic_sd_schedule_lookup(
            spec.num_speculative_tokens_per_batch_size,
            vllm_config.scheduler_config.max_num_seqs,
            most,
        )
        lengths.update(by_batch_size[1:])
    return sorted(lengths)


def widened_config(vllm_config: VllmConfig, layout: DraftLayout) -> VllmConfig:
    """A copy whose token budget is the widest draft batch.

    Copied, not `replace`d: replacing validates the config again, including parts that
    the target still uses.
    """
    scheduler = copy(vllm_config.scheduler_config)
    widest = layout.max_num_tokens(
        scheduler.max_num_batched_tokens, scheduler.max_num_seqs
    )
    compilation = copy(vllm_config.compilation_config)
    endpoints = compilation.compile_ranges_endpoints or []
    if endpoints and endpoints[-1] == scheduler.max_num_batched_tokens:
        endpoints = endpoints[:-1]
    compilation.compile_ranges_endpoints = [*endpoints, widest]
    scheduler.max_num_batched_tokens = widest
    if vllm_config.speculative_config.enforce_eager:
        compilation.mode = CompilationMode.NONE
        compilation.cudagraph_mode = CUDAGraphMode.NONE
        # Without a compiler, nothing fuses native PyTorch ops.
        ops = [op for op in compilation.custom_ops if op not in ("all", "none")]
        compilation.custom_ops = ["all", *ops]
    config = copy(vllm_config)
    config.scheduler_config = scheduler
    config.compilation_config = compilation
    return config


def attention_config(config: VllmConfig, layout: DraftLayout) -> VllmConfig:
    """The config for the drafter's attention metadata builders.

    Attention heads are the draft model's; block tables reach past the target's longest
    sequence; decode queries are as wide as the first draft pass.
    """
    target, spec = config.model_config, config.speculative_config
    view = copy(config)
    view.parallel_config = copy(config.parallel_config)
    shared_by = spec.draft_parallel_config.tensor_parallel_size
    view.parallel_config.tensor_parallel_size = shared_by
    view.model_config = copy(spec.draft_model_config)
    view.model_config.max_model_len = target.max_model_len + layout.num_room_tokens
    view.speculative_config = copy(spec)
    view.speculative_config.num_speculative_tokens += layout.num_extra_slots
    # Metadata supports graphs up to this many tokens: the drafter's are wider.
    view.compilation_config = copy(config.compilation_config)
    largest = config.compilation_config.max_cudagraph_capture_size or 0
    most = config.scheduler_config.max_num_seqs
    slots = max(layout.num_extra_slots, layout.num_follow_slots)
    view.compilation_config.max_cudagraph_capture_size = largest + slots * most
    return view


TENSOR, PIPELINE = "_TP", "_PP"  # vLLM's groups of ranks


def draft_ranks(vllm_config: VllmConfig) -> Callable[[], AbstractContextManager]:
    """The context to build and run a draft model in: `with draft_ranks(c)(): …`."""
    target = vllm_config.parallel_config
    own = vllm_config.speculative_config.draft_parallel_config
    sizes = {
        TENSOR: (own.tensor_parallel_size, target.tensor_parallel_size),
        PIPELINE: (own.pipeline_parallel_size, target.pipeline_parallel_size),
    }
    alone = [group for group, (size, shared) in sizes.items() if size == 1 < shared]
    return partial(as_only_rank, alone) if alone else nullcontext


@contextmanager
def as_only_rank(groups: list[str]) -> Iterator[None]:
    """Within it, models are built and run as if this were the only rank of `groups`."""
    shared = {name: getattr(parallel_state, name) for name in groups}
    for name, group in shared.items():
        setattr(parallel_state, name, _alone(group))
    try:
        yield
    finally:
        for name, group in shared.items():
            setattr(parallel_state, name, group)


def _alone(group: parallel_state.GroupCoordinator) -> parallel_state.GroupCoordinator:
    """A group of one rank, within which vLLM communicates nothing."""
    alone = copy(group)
    alone.ranks, alone.world_size, alone.rank_in_group = [group.rank], 1, 0
    alone.device_communicator = alone.mq_broadcaster = None
    return alone
