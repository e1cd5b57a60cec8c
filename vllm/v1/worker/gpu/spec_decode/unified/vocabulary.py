# SPDX-License-Identifier: Apache-2.0
"""Drafting in another vocabulary than the target's.

Token-level intersection (TLI of arXiv 2502.05202; on Runner V1 vLLM PR #38174):
drafts are of the tokens that both vocabularies have. Everything beside the draft model
keeps to the target's ids, as with a head that drafts some of the target's tokens: ids
are mapped where the model is fed, logits where it answers. So drafts, the
probabilities that verify them, and trees are the target's tokens.
"""

import torch
import torch.nn as nn

from vllm.v1.spec_decode.vocab_mapping import VocabMapping


class DraftVocabulary:
    """Which of the drafter's tokens are which of the target's.

    D is the number of the drafter's tokens, V of the target's.

    Attributes:
        size: V.
        mask_token_id: V, which stands for the drafter's mask token, of which the target
            need not have one.
        to_draft: [V + 1] int32, ids of the drafter, of its unknown token for a token
            that it lacks.
        is_absent: [V] bool, the tokens that it lacks.
        to_target: [D] int64, ids of the target, likewise.
        is_common: [D] bool, the tokens that the target has.
        bias: [rows of this rank's lm_head], -inf for tokens that the target lacks; None
            until it is asked for.
    """

    def __init__(
        self, mapping: VocabMapping, mask_token_id: int | None, device: torch.device
    ):
        """
        Args:
            mask_token_id: the drafter's own id; None if it has none.
            device: where the tables go.
        """
        self.size = self.mask_token_id = mapping.target_vocab_size
        every = torch.arange(self.size, device=mapping.device)
        mask = every.new_tensor([mask_token_id or 0])
        to_draft = torch.cat([mapping.map_target_to_draft_ids(every), mask])
        self.to_draft = to_draft.to(device, torch.int32)
        self.is_absent = (mapping.target_to_draft_ids < 0).to(device)
        every = torch.arange(mapping.draft_vocab_size, device=mapping.device)
        self.to_target = mapping.map_draft_to_target_ids(every).to(device)
        self.is_common = mapping.intersection_mask_draft.to(device)
        self.bias: torch.Tensor | None = None

    def input_ids(self, ids: torch.Tensor) -> torch.Tensor:
        """[N] int32, what the draft model is fed for the target's ids, [N] int32."""
        return self.to_draft.index_select(0, ids)

    def target_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """[S, V] by the target's ids, -inf for tokens that the drafter lacks.

        Args:
            logits: [S, D], the draft model's.
        """
        spread = logits.index_select(1, self.to_draft[: self.size])
        return spread.masked_fill_(self.is_absent, float("-inf"))

    def best_tokens(
        self, model: nn.Module, hidden_states: torch.Tensor
    ) -> torch.Tensor:
        """[S] int64, the target's ids of the likeliest tokens that both have.

        Ranks of a tensor-parallel group exchange their best ones, not their logits.

        Args:
            model: the draft model.
            hidden_states: [S, H], its output.
        """
        if self.bias is None:
            self.bias = self._bias_of(model.lm_head, hidden_states.dtype)
        top = model.logits_processor.get_top_tokens(
            model.lm_head, hidden_states, self.bias
        )
        return self.to_target[top]

    def _bias_of(self, lm_head: nn.Module, dtype: torch.dtype) -> torch.Tensor:
        shard, rows = lm_head.shard_indices, lm_head.num_embeddings_per_partition
        own = self.is_common[shard.org_vocab_start_index : shard.org_vocab_end_index]
        bias = torch.full((rows,), float("-inf"), dtype=dtype, device=own.device)
        bias[: len(own)].masked_fill_(own, 0.0)
        return bias
