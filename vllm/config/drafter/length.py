# SPDX-License-Identifier: Apache-2.0
"""How much is drafted and verified: draft lengths, trees, partial verification.

With `num_speculative_tokens_per_batch_size="auto"` the engine chooses. The string stays
in the config, as an `AutoSchedule`. All readers of the schedule call
`build_dynamic_sd_schedule_lookup`, which for "auto" lists every candidate, so that each
has its CUDA graphs; in each step `StepDrafts` asks the scheduler's `Chooser` instead.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger
from vllm.platforms import current_platform

from . import (
    BLOCK_METHODS,
    MAX_NODES,
    METHODS,
    ROWS_PER_PASS,
    DrafterConfig,
    depth_with_passes,
    first_of,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.config.speculative import SpeculativeConfig

logger = init_logger(__name__)

AUTO = "auto"
V1 = "Model Runner V1"
# What draft trees need, as it is by default.
TREE_SETTINGS = {"draft_sample_method": "greedy", "rejection_sample_method": "standard"}
# Other methods whose draft length can change from step to step, with vLLM's own
# speculators on Runner V2, by which fewer drafts are verified.
OTHER_METHODS = ("dflash", "dspark", "ngram", "ngram_gpu")
# The maximum K of a drafter that does not say what it was trained for.
DEFAULT_LONGEST = 7
# The best throughput of neighbours differs by little; each length costs CUDA graphs.
CHAINS = (0, 1, 2, 3, 4, 5, 7, 9, 12, 16, 21, 28)
# Nodes of trees that are drafted in one pass. With the last token, up to sixteen rows
# more each.
TREES = (11, 15, 23, 31, 47, 63)
# Most tree rows in a step that may pay: from about here on the time of the target's
# matrix products is proportional to the rows.
MAX_TREE_ROWS = 256
# Fewest requests of a batch of which only part of the drafts may be verified: if this
# was enabled explicitly, and by default. A fixed draft length can be too long for a
# small batch. A chosen one leaves nothing to gain while the target is memory-bound:
# P-EAGLE on an H200 gains 5 % at 32 requests in steady decoding, and 9 % at 64, but in
# whole rounds, with prompts, it loses 2 % and gains 3 %.
MIN_REQUESTS, MIN_REQUESTS_BY_DEFAULT = 8, 64


class AutoSchedule(str):
    """The string "auto", once the candidate `lengths` are known: draft tokens of a
    request, ascending; those above the drafter's depth are nodes of trees."""

    lengths: tuple[int, ...]

    def __new__(cls, lengths: Iterable[int]) -> "AutoSchedule":
        made = super().__new__(cls, AUTO)
        made.lengths = tuple(lengths)
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        return AutoSchedule, (self.lengths,)


def is_auto(spec: Any) -> bool:
    """Whether a speculative config, or None, leaves the draft length to the engine."""
    return spec is not None and spec.num_speculative_tokens_per_batch_size == AUTO


def lengths_vary(spec: Any) -> bool:
    """Whether the engine has several draft lengths to choose from."""
    return is_auto(spec) and len(chosen_lengths(spec)) > 1


def trims(spec: Any) -> bool:
    """Whether a step may verify only part of the unified speculator's drafts."""
    return drafts_unified(spec) and spec.enable_adaptive_verification


def drafts_unified(spec: Any) -> bool:
    """Whether the unified speculator drafts; False without a resolved drafter."""
    drafter = getattr(spec, "drafter", None)
    return isinstance(drafter, DrafterConfig) and drafter.is_unified


def least_trimmed(spec: Any) -> int:
    """Fewest requests of a batch of which only part of the drafts may be verified."""
    return (
        MIN_REQUESTS_BY_DEFAULT if spec.drafter.is_trimmed_by_default else MIN_REQUESTS
    )


def candidate_lengths(
    depth: int, num_nodes: int | None = None, trees: Iterable[int] = TREES
) -> list[int]:
    """The draft lengths to choose from, ascending: chains up to K = `depth`, and trees
    of up to `num_nodes` nodes, of those in `trees`; None: no trees."""
    chains = [k for k in CHAINS if k < depth] + [depth]
    if num_nodes is None or num_nodes <= depth:
        return chains
    return [*chains, *(n for n in trees if depth < n < num_nodes), num_nodes]


def tree_sizes(drafter: DrafterConfig) -> list[int]:
    """Nodes of the trees that "auto" may choose from, ascending; none if the drafter
    can draft none."""
    depth, width = drafter.num_speculative_tokens, drafter.parallel_width
    if width == 1:
        sizes = [ROWS_PER_PASS * passes - 1 for passes in range(2, depth + 1)]
        return [nodes for nodes in sizes if depth < nodes <= MAX_NODES]
    return [nodes for nodes in TREES if depth < nodes] if width == depth else []


def depth_of(spec: Any, num_drafts: int) -> int:
    """The most drafts of a step that can be accepted, if it asks for `num_drafts`: the
    length of a chain, or a tree's depth: K, or less where "auto" drafts small trees in
    fewer passes."""
    drafter, depth = spec.drafter, spec.drafter.num_speculative_tokens
    if num_drafts > depth and drafter.parallel_width == 1 and is_auto(spec):
        return depth_with_passes(num_drafts, depth)
    return min(depth, num_drafts)


def chosen_lengths(spec: "SpeculativeConfig") -> list[int]:
    """The draft lengths that an engine with "auto" chooses from."""
    schedule = spec.num_speculative_tokens_per_batch_size
    return lengths_of(schedule, spec.num_speculative_tokens)


def lengths_of(schedule: str, depth: int) -> list[int]:
    """The draft lengths of "auto"; chains up to `depth` before it is resolved."""
    is_resolved = isinstance(schedule, AutoSchedule)
    return list(schedule.lengths) if is_resolved else candidate_lengths(depth)


def is_worth_trees(spec: Any, num_reqs: int, num_nodes: int) -> bool:
    """Whether a step of `num_reqs` requests may verify trees of `num_nodes` nodes."""
    return not is_auto(spec) or num_reqs * (num_nodes + 1) <= MAX_TREE_ROWS


def covering_lookup(
    max_batch_size: int, num_verified: int, schedule: str = AUTO
) -> list[int]:
    """A lookup by batch size that contains every candidate.

    The candidates are at the largest batch sizes, since graphs of a length are captured
    up to the largest batch size that has it. With more candidates than batch sizes, the
    lookup has entries for larger batches, too.

    Args:
        num_verified: the most drafts of a request in a step; of trees, their nodes.
    """
    candidates = lengths_of(schedule, num_verified)
    rest = max(1, max_batch_size + 1 - len(candidates))  # entry 0 is unused
    return [num_verified] * rest + candidates


# Settings.


def fill_length(
    spec: "SpeculativeConfig", trained: int | None = None, usual: int | None = None
) -> None:
    """Fills in K, and "auto" if the user sets neither K nor a schedule nor a tree.

    Args:
        trained: K that the checkpoint names, valid or not.
        usual: K of its family, else `DEFAULT_LONGEST`; "auto" chooses up to the larger.
    """
    schedule, drafts = spec.num_speculative_tokens_per_batch_size, None
    is_ours = spec.method in METHODS
    is_fitted = is_ours or spec.method in BLOCK_METHODS
    if spec.num_speculative_tokens is not None:
        return
    if is_fitted and schedule is None and spec.draft_tree is None:
        spec.num_speculative_tokens_per_batch_size = schedule = AUTO
        spec.is_auto_by_default = True
    if schedule and schedule != AUTO and spec.draft_tree is None:
        drafts = max(entry[2] for entry in schedule) or None
    if usual and schedule == AUTO:
        usual = max(usual, DEFAULT_LONGEST)  # not drafted in every step
    choices = drafts, trained, usual, DEFAULT_LONGEST if is_ours else None
    spec.num_speculative_tokens = next((k for k in choices if k is not None), None)


def check_lengths(spec: "SpeculativeConfig", drafter: DrafterConfig) -> None:
    """Refuses a width, tree or schedule of draft lengths that the drafter cannot draft,
    or that contradicts another setting."""
    width, is_ours = spec.parallel_drafting_width, drafter.method in METHODS
    is_parallel = drafter.is_parallel and is_ours
    most = drafter.num_speculative_tokens if is_parallel else 1
    if width is not None and width > most:
        raise ValueError(
            f"parallel_drafting_width ({width}) must be at most {most}: "
            "num_speculative_tokens with parallel drafting, else 1."
        )
    if spec.draft_tree is not None:
        _check_tree(spec, drafter)
    if not is_auto(spec) and spec.num_speculative_tokens_per_batch_size is not None:
        _check_schedule(spec, drafter.num_verified)


def _check_tree(spec: "SpeculativeConfig", drafter: DrafterConfig) -> None:
    nodes, depth = spec.draft_tree, drafter.num_speculative_tokens
    width = drafter.parallel_width
    found = first_of(
        {
            f"method {drafter.method}": drafter.method not in METHODS + BLOCK_METHODS,
            str(drafter.no_lattice): drafter.is_block and drafter.no_lattice,
            f"parallel_drafting_width={width}, neither 1 nor {depth}": (
                1 < width < depth
            ),
        }
        | {
            f'{name}="{getattr(spec, name)}"': getattr(spec, name) != value
            for name, value in TREE_SETTINGS.items()
        }
    )
    if found is not None:
        raise ValueError(
            f"draft_tree does not support {found}: unset one of the two. Without "
            "draft_tree, chains are drafted."
        )
    if nodes < depth:  # its field refuses more than MAX_NODES
        raise ValueError(
            f"draft_tree ({nodes}) must be from num_speculative_tokens ({depth}), the "
            f"chain that it begins with, to {MAX_NODES}: change one of the two."
        )


def _check_schedule(spec: "SpeculativeConfig", limit: int) -> None:
    from vllm.v1.spec_decode.dynamic import utils

    schedule = spec.num_speculative_tokens_per_batch_size
    named = f"num_speculative_tokens_per_batch_size {schedule}"
    try:
        utils.validate_and_normalize_dynamic_sd_schedule(schedule)
    except ValueError as error:
        raise ValueError(
            f"{named}: {error} Write [first batch size, last batch size, draft length] "
            "for ranges from 1 on, such as [[1, 8, 4], [9, 64, 2]]."
        ) from None
    longest = max(entry[2] for entry in schedule)
    if not 0 < longest <= limit:
        key = "draft_tree" if spec.draft_tree else "num_speculative_tokens"
        raise ValueError(
            f"{named} drafts at most {longest} tokens, which must be from 1 to {key} "
            f"({limit}): change one of the two."
        )


def verify_whole_trees(spec: "SpeculativeConfig") -> None:
    """Turns adaptive verification off if every step verifies a tree, and logs it."""
    if (
        not spec.enable_adaptive_verification
        or spec.draft_tree is None
        or is_auto(spec)
    ):
        return
    spec.enable_adaptive_verification = False
    logger.warning(
        "enable_adaptive_verification does nothing beside draft_tree=%d: every step "
        "verifies whole trees. Unset one of the two, or have the engine choose between "
        'trees and trimmed chains: "num_speculative_tokens_per_batch_size": "%s".',
        spec.draft_tree,
        AUTO,
    )


# What the engine chooses while serving: how much is drafted, and how much verified.


def settle_lengths(
    vllm_config: "VllmConfig", drafter: DrafterConfig
) -> tuple[DrafterConfig, Any, bool]:
    """The drafter with its largest tree, the schedule of draft lengths, and whether
    adaptive verification is on.

    Refuses "auto" where the engine cannot choose; if it is only the default, the length
    is fixed instead, and one log line says why.
    """
    spec, depth = vllm_config.speculative_config, drafter.num_speculative_tokens
    schedule = spec.num_speculative_tokens_per_batch_size
    why = _why_fixed(vllm_config, drafter) if schedule == AUTO else None
    if why is not None and not spec.is_auto_by_default:
        raise ValueError(
            f'num_speculative_tokens_per_batch_size="{AUTO}" does not support {why}: '
            "give num_speculative_tokens alone, or turn that off."
        )
    if why is not None:
        logger.info(
            "Every draft has %d tokens: choosing by load and acceptance does not "
            "support %s. Set num_speculative_tokens for another number.",
            depth,
            why,
        )
        schedule = None
    is_trimmed = spec.enable_adaptive_verification
    if is_trimmed is None:
        is_trimmed = schedule == AUTO and _is_trimmed_by_default(vllm_config, drafter)
        drafter = replace(drafter, is_trimmed_by_default=is_trimmed)
    if schedule is None and drafter.is_unified and is_trimmed:
        # The engine then chooses how many drafts to verify, instead of the length.
        schedule = AutoSchedule([depth])
    elif schedule == AUTO:
        num_nodes = drafter.num_nodes or _nodes_to_choose(vllm_config, drafter)
        lengths = candidate_lengths(depth, num_nodes, tree_sizes(drafter))
        drafter = replace(drafter, num_nodes=num_nodes)
        schedule = AutoSchedule(lengths)
    return drafter, schedule, is_trimmed


def _why_fixed(vllm_config: "VllmConfig", drafter: DrafterConfig) -> str | None:
    """Why the engine cannot choose the draft length; None if it can. What others than
    the unified speculator may gain from it is left to the user."""
    spec, parallel = vllm_config.speculative_config, vllm_config.parallel_config
    is_v2, is_default = vllm_config.use_v2_model_runner, spec.is_auto_by_default
    is_ours, is_other = spec.method in METHODS, not drafter.is_unified
    no_lattice = drafter.no_lattice if spec.method == "dspark" else None
    is_excluded = spec.method not in METHODS + OTHER_METHODS
    may_not = is_excluded or (is_ours and (is_default or not is_v2))
    reasons = {
        str(drafter.unsupported): drafter.unsupported and may_not,
        # Later modules also write KV of draft tokens. The K rows of the next step
        # overwrite it; after a shorter draft there are fewer rows.
        "method mtp of several modules, which all run in every step": (
            spec.use_multi_module_mtp()
        ),
        'distributed_executor_backend="external_launcher", where each rank would '
        "choose by its own clock": (
            parallel.distributed_executor_backend == "external_launcher"
        ),
        "enable_elastic_ep, where a rank that joins does not know what the others "
        "agreed to draft": parallel.data_parallel_size > 1
        and parallel.enable_elastic_ep,
        # If the user sets it, it goes by the time of a single step.
        "pipeline parallelism, where several steps run at once": is_default
        and parallel.pipeline_parallel_size > 1,
        V1: is_other and not is_v2,
        "enable_adaptive_verification": is_other and spec.enable_adaptive_verification,
        # Some of these have kernels for a fixed length alone.
        str(no_lattice): is_default and no_lattice,
    }
    return first_of(reasons)


def why_no_trees_beside(vllm_config: "VllmConfig") -> str | None:
    """What in an engine's config rules out that trees are verified; None if nothing
    does. What depends on the attention backend only workers know."""
    parallel, model = vllm_config.parallel_config, vllm_config.model_config
    reasons = {
        "pipeline parallelism": parallel.pipeline_parallel_size > 1,
        "context parallelism": parallel.decode_context_parallel_size > 1
        or parallel.prefill_context_parallel_size > 1,
        "batch-sharded sampling": parallel.enable_batch_sharded_sampling,
        "dual batch overlap": parallel.use_ubatching,
        "a KV connector": vllm_config.kv_transfer_config is not None,
        "returned sampling masks": model.return_sampling_mask,
        "returned routed experts": vllm_config.aux_output_config.enabled,
        # They would keep a state for each node, to verify chains alone.
        "Mamba or linear-attention layers": model.has_inner_state,
    }
    return first_of(reasons)


def _nodes_to_choose(vllm_config: "VllmConfig", drafter: DrafterConfig) -> int | None:
    """The most nodes of a tree that "auto" may choose; None if it chooses no trees."""
    if not drafter.can_draft_trees:
        return None
    spec = vllm_config.speculative_config
    # Trees are candidates only where the engine has fast kernels to verify them.
    possible = (
        all(getattr(spec, name) == value for name, value in TREE_SETTINGS.items())
        and vllm_config.parallel_config.data_parallel_size == 1
        and not current_platform.is_cpu()
        and why_no_trees_beside(vllm_config) is None
    )
    if not possible:
        return None
    # A tree and the token before it are verified in one step.
    rows = vllm_config.scheduler_config.max_num_batched_tokens
    rows = min(rows, vllm_config.model_config.max_model_len)
    return max((nodes for nodes in tree_sizes(drafter) if nodes < rows), default=None)


def _is_trimmed_by_default(vllm_config: "VllmConfig", drafter: DrafterConfig) -> bool:
    """Whether steps of "auto" verify only part of their drafts, if the user does not
    say.

    They do where this may gain something: not with few requests, nor with
    autoregressive drafting, where each draft token takes a pass, so that few are
    drafted where rows take time. If something in the engine does not support it, one
    log line says what; vLLM refuses most of it with `enable_adaptive_verification`. On
    a CPU it gains nothing at 8 requests, and attention like MLA does more in every
    step. What depends on the attention backend only workers know.
    """
    max_num_seqs = vllm_config.scheduler_config.max_num_seqs
    may_gain = max_num_seqs >= MIN_REQUESTS_BY_DEFAULT and drafter.is_parallel
    if not (drafter.is_unified and may_gain):
        return False
    spec, model = vllm_config.speculative_config, vllm_config.model_config
    parallel = vllm_config.parallel_config
    reasons = {
        "a CPU": current_platform.is_cpu(),
        "LoRA": vllm_config.lora_config is not None,
        "data parallelism": parallel.data_parallel_size > 1,
        "pipeline parallelism": parallel.pipeline_parallel_size > 1,
        "batch-sharded sampling": parallel.enable_batch_sharded_sampling,
        "returned sampling masks": model.return_sampling_mask,
        "returned routed experts": vllm_config.aux_output_config.enabled,
        "MLA": model.use_mla,
        "use_local_argmax_reduction": spec.use_local_argmax_reduction,
    }
    unsupported = first_of(reasons)
    if unsupported is not None:
        log_all_verified(unsupported)
    return unsupported is None


def log_all_verified(why: str) -> None:
    """Logs that every step verifies all its drafts, though part would by default."""
    logger.info(
        "Every step verifies all its drafts: verifying only the likeliest of large "
        "batches does not support %s.",
        why,
    )


def described_length(spec: Any) -> str:
    """How much a speculative config drafts, for a log line."""
    depth = getattr(spec.drafter, "num_speculative_tokens", spec.num_speculative_tokens)
    nodes = getattr(spec.drafter, "num_nodes", None)
    trees = "" if nodes is None else f", tree_nodes={nodes}"
    return f"num_spec_tokens={depth}{trees}"
