# SPDX-License-Identifier: Apache-2.0
"""Samples the drafts of a pass: a chain, or the candidates of a tree.

Greedy drafts are the most likely tokens. Probabilistic ones are sampled from the
drafter's distribution, against which speculative sampling verifies them
(arXiv 2211.17192, arXiv 2302.01318; as a block, arXiv 2403.10444), by the Gumbel-max
trick: argmax(logits / temperature + noise). `verification.py` says which noise.

A drafter that samples K slots of each of R requests has R * K rows of logits: 2 GB for
1024 requests, 8 drafts and Llama 3's 128256 tokens in bfloat16. They are needed only
until a token is sampled from each row, and rows are independent, so they are computed
in slices.

Everything outside the draft model uses the target's ids. Logits are ranked in the draft
model's own ids, which are mapped afterwards. They are spread over the target's
vocabulary only if drafts are verified against them.
"""

from collections.abc import Callable, Iterator

import torch
import torch.nn as nn

from vllm.config.drafter import num_candidates
from vllm.v1.spec_decode.vocab_mapping import VocabMapping
from vllm.v1.worker.gpu.spec_decode.argmax import best_candidates

from .input_kernel import PreviousDrafts
from .inputs import DraftInputs
from .layout import DraftPlan
from .tree.grow import Beams, Candidates
from .tree.step import TreeStep

# Most bytes of logits at a time. With 128256 tokens in bfloat16 this is 2092 rows: a
# matmul of that size is compute-bound, so reading the lm_head again for each slice
# costs next to nothing.
MAX_LOGITS_BYTES = 512 << 20


class DraftSampler:
    """Samples drafts at the sampled slots of a pass.

    Args:
        drafts: [R, most drafts] int64, written.
        inputs: of the pass.
        sample: samples S slots. Takes [S, H], the model's output; [S] int64, the
            position before each draft; [S] int64, request states, -1 where nothing may
            be sampled; and [S] int32, columns of the draft logits that are kept.
            Returns [S] tokens, by the ids of the logits.
        logit_bytes: of one logit.

    Attributes:
        trees: the draft trees to verify; None if chains are drafted.
        beams: of trees that take several passes.
        vocabulary: of the draft model; set with `model` once that is loaded.
        num_reqs: of the last pass, padded ones included.
    """

    trees: TreeStep | None = None
    beams: Beams
    model: nn.Module
    vocabulary: "Vocabulary"
    num_reqs = 0

    def __init__(
        self,
        drafts: torch.Tensor,
        inputs: DraftInputs,
        sample: Callable[..., torch.Tensor],
        logit_bytes: int,
    ):
        self.drafts, self.inputs = drafts, inputs
        self._sample, self._logit_bytes = sample, logit_bytes
        # [most drafts, R] int32, the column of each draft. Graphs read it.
        num_reqs, most = drafts.shape
        columns = torch.arange(most, dtype=torch.int32, device=drafts.device)
        self._columns = columns[:, None].repeat(1, num_reqs)

    def sample(self, rows: torch.Tensor, plan: DraftPlan, draft_pass: int) -> None:
        """Samples the drafts of a pass.

        Args:
            rows: [num_reqs, W, H], or of beams [num_reqs, B, H], the model's output at
                sampled slots.
            draft_pass: the pass, from 0.
        """
        self.num_reqs = len(rows)
        if plan.layout.num_beams == 1:
            rows = rows[:, : plan.num_samples(draft_pass)]
        if plan.is_tree:
            self.sample_tree(rows, plan, draft_pass)
        else:
            self.sample_chain(rows, plan, draft_pass)

    def finish(self, plan: DraftPlan, num_reqs: int) -> None:
        """Builds the trees of a step of several passes, whose candidates are kept.

        This is no part of CUDA graphs, so trees of all sizes share them.
        """
        if not plan.is_tree or plan.layout.num_passes == 1:
            return
        beams, depth = self.beams, plan.layout.num_speculative_tokens
        self.trees.grow(
            beams.candidates.of_first(num_reqs, depth),
            beams.sample_requests[:num_reqs, :depth],
            self.inputs.batch.idx_mapping[:num_reqs],
            self.drafts[:num_reqs],
            plan.num_drafts,
        )

    def previous(self, plan: DraftPlan, num_reqs: int) -> PreviousDrafts:
        """What a later pass continues from."""
        if plan.layout.num_beams > 1:
            return self.beams.previous(num_reqs)
        return PreviousDrafts(self.drafts[:num_reqs])

    def sample_chain(
        self, rows: torch.Tensor, plan: DraftPlan, draft_pass: int
    ) -> None:
        """One draft at each sampled slot; arguments as of `sample`."""
        num_reqs, samples, size = rows.shape
        batch, width = self.inputs.batch, plan.layout.parallel_width
        done = draft_pass * width
        for part in self.slices(num_reqs, samples):

            def of_slots(values: torch.Tensor, part: slice = part) -> torch.Tensor:
                by_request = values[: num_reqs * width].view(num_reqs, width)
                return by_request[part, :samples].flatten()

            tokens = self._sample(
                rows[part].reshape(-1, size),
                of_slots(batch.sample_positions),
                of_slots(batch.sample_requests),
                self._columns[done : done + samples, part].T.flatten(),
            )
            ids = self.vocabulary.target_ids(tokens).view(-1, samples)
            self.drafts[part, done : done + samples] = ids

    def sample_tree(self, rows: torch.Tensor, plan: DraftPlan, draft_pass: int) -> None:
        """Each request's tree, or the candidates of one of several passes; arguments as
        of `sample`."""
        n, samples = rows.shape[:2]
        batch = self.inputs.batch
        log_probs, tokens = self.rank_candidates(rows, plan)
        requests, drafts = batch.sample_requests[: n * samples], self.drafts[:n]
        log_probs, tokens = (x.view(n, samples, 1, -1) for x in (log_probs, tokens))
        if plan.layout.num_passes > 1:
            self.beams.extend(draft_pass, log_probs, tokens, requests[:n], drafts)
            return
        self.trees.grow(
            Candidates(log_probs, tokens),
            requests.view(n, samples),
            batch.idx_mapping[:n],
            drafts,
            plan.num_drafts,
        )

    def rank_candidates(
        self, rows: torch.Tensor, plan: DraftPlan
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities, and tokens in the target's ids, [n * W, C] each; see
        `best_candidates`."""
        count = num_candidates(plan.num_drafts, plan.layout.num_passes == 1)
        count, parts = min(count, self.vocabulary.size), []
        for part in self.slices(*rows.shape[:2]):
            logits = self.vocabulary.logits(self.model, rows[part].flatten(0, 1))
            log_probs, tokens = best_candidates(logits, count)
            parts.append((log_probs, self.vocabulary.target_ids(tokens)))
        if len(parts) == 1:
            return parts[0]
        log_probs, tokens = zip(*parts, strict=True)
        return torch.cat(log_probs), torch.cat(tokens)

    def slices(self, num_reqs: int, samples: int) -> Iterator[slice]:
        """Requests whose logits, `samples` rows each, are computed together: slices of
        about equally many, one if the logits of all fit.

        They depend on the arguments alone, so the graph of a batch contains all its
        slices.
        """
        of_request = samples * self.vocabulary.size * self._logit_bytes
        count = -(-num_reqs // max(MAX_LOGITS_BYTES // of_request, 1))
        for number in range(count):
            yield slice(num_reqs * number // count, num_reqs * (number + 1) // count)


class Vocabulary:
    """The target's own vocabulary, which most draft models have.

    Methods take the draft model and `states`, [S, H], its output at S sampled slots.
    V is the size of the target's vocabulary.

    Attributes:
        size: of the vocabulary of the logits (D).
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
