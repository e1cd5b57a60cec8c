# SPDX-License-Identifier: Apache-2.0
"""The resolved drafter: all that the engine asks of a drafter but its weights."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

# What the unified speculator drafts with.
METHODS = ("draft_model", "eagle", "eagle3")
# What metrics call methods that draft several tokens per pass.
PARALLEL_MODES = {"draft_model": "pard", "eagle3": "peagle"}
# What drafters are called, which users take for a method, and the method it is.
NAMES = {"pard": "draft_model", "pard2": "draft_model", "pard-2": "draft_model"}
NAMES |= {"peagle": "eagle3", "p-eagle": "eagle3"}
DrafterName = Literal["pard", "pard2", "pard-2", "peagle", "p-eagle"]
MAX_NODES = 127  # with the last token, a row of 128 bits says whom a node attends to


def num_candidates(num_nodes: int) -> int:
    """Tokens of each position that a tree of so many nodes may choose from.

    With 16 in the place of 8 the bundled drafters accept as many tokens a step by trees
    of 15 nodes, and 0.9 % more by trees of 31.
    """
    return 8 if num_nodes <= 15 else 16


@dataclass(frozen=True)
class TargetFeatures:
    """What a drafter is fed of the target.

    Attributes:
        layers: whose states stand side by side, in this order. Layer i is the stream
            that enters layer i of the target; `depth` is the state after its last norm.
        depth: layers of the target.
        scale: of the projection, as it is added to the embeddings.
        warp: file with the projection.
    """

    layers: tuple[int, ...]
    depth: int
    scale: float
    warp: Path

    @property
    def tapped(self) -> tuple[int, ...]:
        """Layers that the target has to hand out: all but its output."""
        return tuple(sorted({layer for layer in self.layers if layer != self.depth}))


@dataclass(frozen=True)
class DrafterConfig:
    """What a speculative config and its checkpoint come to.

    Attributes:
        method: of the speculative config, as resolved.
        num_speculative_tokens: K, the most tokens that a request can gain in a step by
            drafting: how deep it drafts.
        family: which drafters it is published like, a name in `families.FAMILIES`;
            None for a language model, and for methods of vLLM's own speculators.
        is_parallel: whether it drafts several tokens per pass.
        parallel_width: tokens per pass, from 1 to K; 1 for autoregressive drafting.
        num_nodes: N, the nodes of the tree that is verified per request and step, from
            K on. None: K tokens in a chain.
        mask_token_id: of the slots to be drafted; None for autoregressive drafting.
        context: positions that it can draft at, from 0 on; None: all of the target's.
        tapped_layers: ids of the target's layers whose inputs it is fed; empty: none
            but the target's output, if that; None: the target's defaults.
        target_features: what a PARD-2 drafter is fed, if it is.
        checkpoint_vocab_size: rows of its vocabulary's tables, where loading has to
            pad or cut them to the target's.
        vocabulary: a `VocabMapping` on the CPU, where its tokens are not the target's.
        unsupported: what of the config the unified speculator does not support; None
            if nothing. Then vLLM's own speculator drafts.
        is_unified: whether the unified speculator drafts: it supports the config, and
            Model Runner V2 runs. None until the engine's config is made.
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
    # Pydantic, which looks at all fields, has no schema for its type.
    vocabulary: Any = field(default=None, compare=False, repr=False)
    unsupported: str | None = None
    is_unified: bool | None = None

    @property
    def mode(self) -> str:
        """What metrics call the way it drafts: the method, PARD, PARD-2 or P-EAGLE."""
        if self.family == "PARD-2":
            return "pard2"
        if self.is_parallel:
            return PARALLEL_MODES.get(self.method, self.method)
        return self.method

    @property
    def num_verified(self) -> int:
        """Drafts of a request that a step verifies: N of a tree, else K."""
        return self.num_nodes or self.num_speculative_tokens

    @property
    def why_not_unified(self) -> str | None:
        """Why vLLM's own speculator drafts; None if the unified one does."""
        if self.is_unified:
            return None
        return self.unsupported or "Model Runner V1"

    def limit(self, target_limit: int) -> int:
        """First position that it cannot draft.

        Args:
            target_limit: the target's `max_model_len`; the engine may lower it to fit
                its KV cache.
        """
        return min(target_limit, self.context or target_limit)
