# SPDX-License-Identifier: Apache-2.0
"""The vocabulary of a draft model's logits, and its mapping to the target's.

Everything outside the draft model uses the target's ids. Logits are ranked in the draft
model's own ids, which are mapped afterwards. They are spread over the target's
vocabulary only if drafts are verified against them.

S is the number of sampled rows, H their width, D the vocabulary size of the logits, V
that of the target.
"""

import torch
import torch.nn as nn

from vllm.v1.spec_decode.vocab_mapping import VocabMapping


class Vocabulary:
    """The target's own vocabulary, which most draft models have.

    Methods take the draft model and `states`, [S, H], its output at sampled slots.

    Attributes:
        size: D.
    """

    def __init__(self, size: int):
        self.size = size

    def input_ids(self, ids: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """[num_tokens] int32 at a fixed address, the draft model's ids for the target's
        `ids`, [at least num_tokens] int32."""
        return ids[:num_tokens]

    def logits(self, model: nn.Module, states: torch.Tensor) -> torch.Tensor:
        """[S, D], -inf for what must not be drafted."""
        return model.compute_logits(states)

    def best_tokens(self, model: nn.Module, states: torch.Tensor) -> torch.Tensor:
        """[S] int64, the most likely tokens, below D. Tensor-parallel ranks exchange
        their best tokens, not their logits."""
        return model.get_top_tokens(states)

    def target_ids(self, tokens: torch.Tensor) -> torch.Tensor:
        """The target's ids of tokens below D, of the same shape and dtype."""
        return tokens


class OwnVocabulary(Vocabulary):
    """The vocabulary of a drafter whose lm_head has ids of its own, such as an EAGLE-3
    head with a reduced vocabulary.

    Attributes:
        offsets: [D] int64, added to an id to get the target's. For a head, its own
            parameter, which is reloaded with the others.
        bias: [rows of this rank's lm_head], -inf for what must not be drafted; None if
            everything may be.
    """

    bias: torch.Tensor | None = None

    def __init__(self, offsets: torch.Tensor):
        super().__init__(len(offsets))
        self.offsets = offsets

    @classmethod
    def of_head(cls, head: nn.Module) -> "OwnVocabulary | None":
        """The vocabulary of a head; None if it has the target's."""
        offsets = getattr(head, "draft_id_to_target_id", None)
        # Without weights to load (load_format="dummy") vLLM gives a head with a reduced
        # vocabulary the target's lm_head, which has more rows than it has tokens.
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
    """A draft model's own vocabulary; only tokens that the target has too are drafted.

    Token-level intersection (TLI of arXiv 2502.05202; on Runner V1 vLLM PR #38174).

    Args:
        mask_token_id: the drafter's own id; None if it has none.

    Attributes:
        mask_token_id: V, which stands for the drafter's mask token: the target need not
            have one.
        to_draft: [V + 1] int32, the drafter's ids; its unknown token for tokens that it
            lacks.
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
        if self.bias is None:  # before graphs are captured
            head, shard = model.lm_head, model.lm_head.shard_indices
            rows = slice(shard.org_vocab_start_index, shard.org_vocab_end_index)
            missing = self.is_missing[rows]
            self.bias = states.new_zeros(head.num_embeddings_per_partition)
            self.bias[: len(missing)].masked_fill_(missing, float("-inf"))
        return super().best_tokens(model, states)


class SpreadVocabulary(MappedVocabulary):
    """The same with logits over the target's vocabulary, against which probabilistic
    drafts are verified: D is V. Its `best_tokens` is not used.

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
