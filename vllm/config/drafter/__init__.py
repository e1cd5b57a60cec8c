# SPDX-License-Identifier: Apache-2.0
"""Resolves `--speculative-config` and a drafter's files into one `DrafterConfig`.

This is done once, before weights load; the result is `speculative_config.drafter`. What
the engine measures later is a second value, `StepTimes`. Imports go down this list:

- `resolve.py`: the steps to the result, and which speculator drafts.
- `weights.py`, `target.py`: check the drafter against the target.
- `files.py`: finds, reads and interprets the drafter's files, and fills in settings
  from them.
- `length.py`: how much is drafted and verified.
- this file: the families of published drafters, and the two values.

To refuse is to raise a ValueError that says what to change: every `check_…` does.
"""

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

# Methods whose drafters have a checkpoint of their own, and those of the unified
# speculator. An MTP module is a part of the target's checkpoint.
OWN_CHECKPOINTS = ("draft_model", "eagle", "eagle3")
METHODS = (*OWN_CHECKPOINTS, "mtp")
# Methods whose drafters draft a block in one pass, by vLLM's own speculators.
BLOCK_METHODS = ("dflash", "dspark")
# Names in metrics of methods that draft several tokens per pass.
PARALLEL_MODES = {"draft_model": "pard", "eagle3": "peagle"}
# Names of drafters that are accepted as `method`, and the method that each means.
NAMES = {"pard": "draft_model", "pard2": "draft_model", "pard-2": "draft_model"}
NAMES |= {"peagle": "eagle3", "p-eagle": "eagle3"}
DrafterName = Literal["pard", "pard2", "pard-2", "peagle", "p-eagle"]
MAX_NODES = 127  # with the last token, a node's attention mask has 128 bits

# With one pass per depth, nodes of a tree for each.
ROWS_PER_PASS = 4
# Open nodes that each of these passes continues. With an EAGLE-3 head of a real model,
# 4 instead of 1 give 5 to 8 % more tokens a step in trees of 15 nodes, 10 to 14 % in
# those of 31; 8 give 1 to 2 % more (`benchmarks/results/cpu/width.json`).
BEAMS = 4
# Candidate tokens of a depth that is drafted in a pass of its own.
CANDIDATES_OF_PASS = 8


def num_candidates(num_nodes: int, is_one_pass: bool = True) -> int:
    """Candidate tokens per position for a tree of `num_nodes` nodes.

    If they are drafted in one pass, 16 instead of 8 give the bundled drafters 0.9 %
    more tokens per step with trees of 31 nodes, and no more with trees of 15.
    """
    return 16 if is_one_pass and num_nodes > 15 else CANDIDATES_OF_PASS


def depth_with_passes(num_nodes: int, most: int) -> int:
    """Depth that "auto" gives a tree with one pass per depth, at most `most`."""
    return min(most, max(2, (num_nodes + 1) // ROWS_PER_PASS))


def first_of(reasons: Mapping[str, bool]) -> str | None:
    """The first reason that holds; None if none does."""
    return next((what for what, holds in reasons.items() if holds), None)


# Families of published drafters; `docs/checkpoints.md` shows the table.
SET = r"(?!(False|None|\{\})$).*"  # a value that counts as set


@dataclass(frozen=True)
class DraftFamily:
    """Drafters that are published in one format.

    Attributes:
        name: in logs and docs.
        method: of the speculative config.
        is_parallel: whether it drafts several tokens per pass.
        num_drafts: K if neither the user nor the checkpoint gives it: what its authors
            train or evaluate it with. None: vLLM has a default, or asks the user.
        signs: by which it is told, joined by " or " and " with ": a config key that is
            set, or `key=pattern`, which its value or an item of it matches. The key
            "tensor" stands for the last part of the tensors' names, and "file" for the
            files of a local folder.
    """

    name: str
    method: str
    is_parallel: bool
    num_drafts: int | None
    signs: str


# The first one that matches is used. The first three have vLLM's own speculators; some
# of their configs have keys of other families, too. DeepSeek's DSpark heads have the
# architecture of their target, and Muse Spark's have none.
FAMILIES = (
    DraftFamily(
        "DSpark",
        "dspark",
        True,
        None,
        "architectures=.*DSpark.* or model_type=(?i).*dspark.* or "
        "dspark_noise_token_id or speculators_model_type=dspark",
    ),
    DraftFamily(
        "DFlash",
        "dflash",
        True,
        None,
        "dflash_config or speculators_model_type=dflash|dflash2 or "
        "architectures=.*(DFlash|LiLiCorr|XPress|MuseGlimmerAssistant).*",
    ),
    DraftFamily("MTP", "mtp", False, None, "architectures=.*MTP.*"),
    DraftFamily(
        "PARD-2",
        "draft_model",
        True,
        15,
        "spd_type=pard2 or pard2 or pard2_target_dim=[1-9].* or pard2_target_layers or "
        "file=warp_model.bin",
    ),
    DraftFamily(
        "P-EAGLE, speculators", "eagle3", True, 7, "speculators_model_type=peagle"
    ),
    DraftFamily(
        "EAGLE-3, speculators", "eagle3", False, 3, "speculators_model_type=eagle3"
    ),
    DraftFamily("PARD", "draft_model", True, 8, "pard_token"),
    DraftFamily("P-EAGLE, Amazon", "eagle3", True, 7, "ptd_token_id"),
    DraftFamily(
        "P-EAGLE, NeMo",
        "eagle3",
        True,
        7,
        "parallel_drafting=True|1 with mask_token_id",
    ),
    DraftFamily(
        "P-EAGLE, SpecForge or verl-SpeCo",
        "eagle3",
        True,
        7,
        "architectures=PEagleDraftModel|LlamaForCausalLMPeagle or "
        "mask_token_id with tensor=mask_hidden",
    ),
    DraftFamily(
        "EAGLE-3, SpecForge or NVIDIA",
        "eagle3",
        False,
        3,
        "eagle_config or architectures=.*Eagle3.*",
    ),
    DraftFamily("EAGLE-3, SafeAILab", "eagle3", False, 3, "draft_vocab_size"),
)


def find_family(
    config: Mapping[str, Any],
    tensor_names: Callable[[], Collection[str]] = list,
    file_names: Collection[str] = (),
) -> DraftFamily | None:
    """The family of a checkpoint; None for a language model.

    Args:
        config: the parsed config.json.
        tensor_names: its tensors' names, read only when called.
        file_names: names of files beside config.json, if it is a local folder.
    """

    def shows(sign: str) -> bool:
        key, _, pattern = sign.partition("=")
        if key == "tensor":
            values = [name.rpartition(".")[2] for name in tensor_names()]
        elif key == "file":
            values = [*file_names]
        else:
            value = config.get(key)
            values = value if isinstance(value, list) else [value]
        return any(re.fullmatch(pattern or SET, str(each)) for each in values)

    for family in FAMILIES:
        for signs in family.signs.split(" or "):
            if all(map(shows, signs.split(" with "))):
                return family
    return None


@dataclass(frozen=True)
class DraftCheckpoint:
    """How a checkpoint was trained to draft.

    Attributes:
        family: None for a language model.
        method: None if neither config nor tensors say it.
        num_speculative_tokens: draft tokens that it was trained for, as in its config,
            valid or not; None if it does not say.
    """

    family: DraftFamily | None
    method: str | None
    num_speculative_tokens: Any = None

    @property
    def is_parallel(self) -> bool:
        """Whether it was trained to draft several tokens per pass."""
        return self.family is not None and self.family.is_parallel


# What a speculative config comes to.


@dataclass(frozen=True)
class TargetFeatures:
    """The target's hidden states that a PARD-2 drafter is fed.

    Attributes:
        layers: whose hidden states are concatenated, in this order: i is the input of
            the target's layer i; `depth` is the output of its final norm.
        depth: number of the target's layers.
        scale: of the projected states, when they are added to the embeddings.
    """

    layers: tuple[int, ...]
    depth: int
    scale: float

    @property
    def tapped(self) -> tuple[int, ...]:
        """Layers whose inputs the target has to return: all but its output."""
        return tuple(sorted({layer for layer in self.layers if layer != self.depth}))


@dataclass(frozen=True)
class DrafterConfig:
    """A speculative config, its checkpoint and the engine's config, resolved.

    `speculative_config.drafter`, set once, before weights load.

    Attributes:
        method: of the speculative config, as resolved.
        num_speculative_tokens: K, the depth of drafts: the most draft tokens of a
            request that can be accepted in a step.
        family: name of its family in `FAMILIES`; None for a language model,
            and for methods of vLLM's own speculators.
        is_parallel: whether it drafts several tokens per pass.
        parallel_width: tokens per pass, from 1 to K; 1 for autoregressive drafting.
        num_nodes: N, the most nodes of a draft tree that is verified per request and
            step, at least K. None: chains of at most K tokens.
        mask_token_id: of the slots to be drafted; None for autoregressive drafting.
        context: number of positions, from 0, that it can draft at; None: all of the
            target's.
        tapped_layers: ids of the target's layers whose inputs it is fed; empty: no
            layers, but possibly the target's output; None: the target's defaults.
        target_features: hidden states that a PARD-2 drafter is fed; None: it is fed
            none.
        checkpoint_vocab_size: rows of its embeddings and lm_head in the checkpoint, if
            loading has to pad or cut them to the target's; else None.
        vocabulary: a `VocabMapping` on the CPU if its tokens are not the target's.
        unsupported: what in the config the unified speculator does not support, so
            that vLLM's own speculator drafts; None if it supports all of it.
        is_unified: whether the unified speculator drafts: it supports the config, and
            Model Runner V2 runs.
        is_block: whether vLLM's speculator of a method in `BLOCK_METHODS` drafts, on
            Model Runner V2.
        no_lattice: why no trees can be grown from its block.
        is_trimmed_by_default: whether `enable_adaptive_verification` is on because the
            user did not set it.
    """

    method: str
    num_speculative_tokens: int
    family: str | None = None
    is_parallel: bool = False
    parallel_width: int = 1
    num_nodes: int | None = None
    mask_token_id: int | None = None
    context: int | None = None
    tapped_layers: tuple[int, ...] | None = ()
    target_features: TargetFeatures | None = None
    checkpoint_vocab_size: int | None = None
    # `Any`, since pydantic inspects all fields and has no schema for VocabMapping.
    vocabulary: Any = field(default=None, compare=False, repr=False)
    unsupported: str | None = None
    is_unified: bool = False
    is_block: bool = False
    no_lattice: str | None = None
    is_trimmed_by_default: bool = False

    @property
    def mode(self) -> str:
        """Its name in metrics: the method, or "pard", "pard2" or "peagle"."""
        if self.family == "PARD-2":
            return "pard2"
        if self.is_parallel:
            return PARALLEL_MODES.get(self.method, self.method)
        return self.method

    @property
    def num_verified(self) -> int:
        """Draft tokens of a request that a step verifies: N with a tree, else K."""
        return self.num_nodes or self.num_speculative_tokens

    @property
    def num_beams(self) -> int:
        """Open nodes that each later pass of a tree continues."""
        rows = (self.num_speculative_tokens - 1) * BEAMS
        in_passes = self.is_unified and self.parallel_width == 1
        has_beams = self.num_nodes is not None and in_passes and rows <= MAX_NODES
        return BEAMS if has_beams else 1

    @property
    def num_lookahead_tokens(self) -> int:
        """Positions past a step's tokens whose KV drafting may write."""
        return (self.num_speculative_tokens - 1) * self.num_beams + 1

    @property
    def is_fitted(self) -> bool:
        """Whether its draft length is the engine's to choose by default."""
        return self.is_unified or self.is_block

    @property
    def can_draft_trees(self) -> bool:
        return self.is_fitted and self.no_lattice is None

    def is_tree(self, num_drafts: int) -> bool:
        """Whether a step that asks for so many draft tokens drafts a tree."""
        return num_drafts > self.num_speculative_tokens

    @property
    def why_not_unified(self) -> str | None:
        """Why vLLM's own speculator drafts; None if the unified one does."""
        return None if self.is_unified else (self.unsupported or "Model Runner V1")

    def limit(self, target_limit: int) -> int:
        """First position that it cannot draft at; `target_limit` is the target's
        `max_model_len`, which the engine may lower to fit its KV cache."""
        return min(target_limit, self.context or target_limit)


@dataclass(frozen=True)
class StepTimes:
    """`speculative_config.step_times`: those that an engine with "auto" measured after
    warm-up; set once, in the process that schedules.

    Attributes:
        passes: seconds of a step by context, number of requests and draft length.
        trimmed: seconds of a step that verifies only part of the longest chains, by
            number of requests and mean number of drafts verified of each; empty if no
            batch is large enough; None if no step is trimmed.
    """

    passes: dict[int, dict[int, dict[int, float]]] = field(default_factory=dict)
    trimmed: dict[int, dict[float, float]] | None = None
