# SPDX-License-Identifier: Apache-2.0
"""Samples the drafts of a pass: a chain, or the candidates of a tree.

Greedy drafts are the most likely tokens. Probabilistic ones are sampled from the
drafter's distribution, against which speculative sampling verifies them
(arXiv 2211.17192, arXiv 2302.01318; as a block, arXiv 2403.10444), by the Gumbel-max
trick: argmax(logits / temperature + noise). `noise.py` says which noise, and why.

A drafter that samples K slots of each of R requests has R * K rows of logits: 2 GB for
1024 requests, 8 drafts and Llama 3's 128256 tokens in bfloat16. They are needed only
until a token is sampled from each row, and rows are independent, so they are computed
in slices.
"""

from collections.abc import Callable, Iterator

import torch
import torch.nn as nn

from vllm.config.drafter import num_candidates
from vllm.v1.worker.gpu.spec_decode.argmax import best_candidates

from .input_kernel import PreviousDrafts
from .inputs import DraftInputs
from .layout import DraftPlan
from .tree.beams import Beams
from .tree.grow import Candidates
from .tree.step import TreeStep
from .vocabulary import Vocabulary

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
    vocabulary: Vocabulary
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
