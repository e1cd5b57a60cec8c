# SPDX-License-Identifier: Apache-2.0
"""The tokens that a draft model's logits are of, and which of the target's they are.

Everything beside the draft model keeps to the target's ids. What the model answers is
ranked as it numbers it, and ids are mapped afterwards: logits are spread over the
target's vocabulary only where it verifies drafts against them.

S is the number of sampled rows, H their width, D of the tokens that logits are of, V
of the target's.
"""

import torch
import torch.nn as nn

from vllm.v1.spec_decode.vocab_mapping import VocabMapping


class Vocabulary:
    """The target's own, which most draft models have.

    Methods take the draft model and `states`, [S, H], its output at sampled slots.

    Attributes:
        size: D.
    """

    def __init__(self, size: int):
        self.size = size

    def input_ids(self, ids: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """[num_tokens] int32, always at one address, what the draft model is fed for
        the target's ids, [at least num_tokens] int32."""
        return ids[:num_tokens]

    def logits(self, model: nn.Module, states: torch.Tensor) -> torch.Tensor:
        """[S, D], -inf for what must not be drafted."""
        return model.compute_logits(states)

    def best_tokens(self, model: nn.Module, states: torch.Tensor) -> torch.Tensor:
        """[S] int64, the likeliest tokens, below D. Ranks of a tensor-parallel group
        exchange their best ones, not their logits."""
        return model.get_top_tokens(states)

    def target_ids(self, tokens: torch.Tensor) -> torch.Tensor:
        """The target's ids of tokens below D, of the same shape and dtype."""
        return tokens


class OwnVocabulary(Vocabulary):
    """Tokens that an lm_head of a drafter's own numbers otherwise, as those of an
    EAGLE-3 head of fewer tokens.

    Attributes:
        offsets: [D] int64, what is added to an id for the target's. Of a head its own
            parameter, which is loaded again with the others.
        bias: [rows of this rank's lm_head], -inf for what must not be drafted; None if
            that is nothing.
    """

    bias: torch.Tensor | None = None

    def __init__(self, offsets: torch.Tensor):
        super().__init__(len(offsets))
        self.offsets = offsets

    @classmethod
    def of_head(cls, head: nn.Module) -> "OwnVocabulary | None":
        """None if a head has the target's."""
        offsets = getattr(head, "draft_id_to_target_id", None)
        # Without weights to load (load_format="dummy") vLLM gives a head of fewer
        # tokens the target's lm_head, the end of which is none of its tokens.
        if offsets is None or head.lm_head.org_vocab_size != len(offsets):
            return None
        return cls(offsets)

    def logits(self, model: nn.Module, states: torch.Tensor) -> torch.Tensor:
        return model.logits_processor(model.lm_head, states)

    def best_tokens(self, model: nn.Module, states: torch.Tensor) -> torch.Tensor:
        find_best = model.logits_processor.get_top_tokens
        return find_best(model.lm_head, states, self.bias)

    def target_ids(self, tokens: torch.Tensor) -> torch.Tensor:
        return tokens + self.offsets[tokens].to(tokens.dtype)


class MappedVocabulary(OwnVocabulary):
    """A draft model's, of which the tokens are drafted that both have.

    Token-level intersection (TLI of arXiv 2502.05202; on Runner V1 vLLM PR #38174).

    Args:
        mask_token_id: the drafter's own id; None if it has none.

    Attributes:
        mask_token_id: V, which stands for the drafter's mask token, of which the target
            need not have one.
        to_draft: [V + 1] int32, ids of the drafter, of its unknown token for a token
            that it lacks.
        is_missing: [D] bool, the tokens that the target lacks.
        fed: int32, as large as the buffer of the target's ids; None until it is known.
    """

    def __init__(
        self, mapping: VocabMapping, mask_token_id: int | None, device: torch.device
    ):
        own = torch.arange(mapping.draft_vocab_size, device=mapping.device)
        super().__init__((mapping.map_draft_to_target_ids(own) - own).to(device))
        self.mask_token_id = mapping.target_vocab_size
        every = torch.arange(self.mask_token_id, device=mapping.device)
        mask = every.new_tensor([mask_token_id or 0])
        to_draft = torch.cat([mapping.map_target_to_draft_ids(every), mask])
        self.to_draft = to_draft.to(device, torch.int32)
        self.is_missing = ~mapping.intersection_mask_draft.to(device)
        self.fed: torch.Tensor | None = None

    def input_ids(self, ids: torch.Tensor, num_tokens: int) -> torch.Tensor:
        if self.fed is None:
            self.fed = torch.empty_like(ids)
        fed = self.fed[:num_tokens]
        return torch.index_select(self.to_draft, 0, ids[:num_tokens], out=fed)

    def logits(self, model: nn.Module, states: torch.Tensor) -> torch.Tensor:
        logits = model.compute_logits(states)
        return logits.masked_fill_(self.is_missing, float("-inf"))

    def best_tokens(self, model: nn.Module, states: torch.Tensor) -> torch.Tensor:
        if self.bias is None:  # before anything is recorded
            head, shard = model.lm_head, model.lm_head.shard_indices
            rows = slice(shard.org_vocab_start_index, shard.org_vocab_end_index)
            missing = self.is_missing[rows]
            self.bias = states.new_zeros(head.num_embeddings_per_partition)
            self.bias[: len(missing)].masked_fill_(missing, float("-inf"))
        return super().best_tokens(model, states)


class SpreadVocabulary(MappedVocabulary):
    """The same, its logits by the target's ids, which probabilistic drafts are verified
    against: D is V. Nobody asks for its best tokens.

    Attributes:
        is_absent: [V] bool, the tokens that the drafter lacks.
    """

    def __init__(self, mapping: VocabMapping, *args):
        super().__init__(mapping, *args)
        self.size = mapping.target_vocab_size
        self.is_absent = (mapping.target_to_draft_ids < 0).to(self.to_draft.device)

    def logits(self, model: nn.Module, states: torch.Tensor) -> torch.Tensor:
        own = model.compute_logits(states)
        spread = own.index_select(1, self.to_draft[: self.size])
        return spread.masked_fill_(self.is_absent, float("-inf"))

    def target_ids(self, tokens: torch.Tensor) -> torch.Tensor:
        return tokens
