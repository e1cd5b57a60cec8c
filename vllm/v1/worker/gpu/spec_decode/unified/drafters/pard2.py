# SPDX-License-Identifier: Apache-2.0
"""PARD-2: a draft model with the target's hidden states added to its embeddings.

PARD-2: arXiv 2605.08632; masks as in PARD, arXiv 2504.18583. A token takes the hidden
state of the preceding token, so that the one for the next token is already known;
`layout.py` says how states and slots are paired.

The first token of a step takes the hidden state of the preceding token, which an
earlier step computed, perhaps for another request with the same prefix. KV cache blocks
are what these steps share. Each block keeps two states: that of the token that ends it,
for any request that continues after it, and that of its last valid token so far, for
the request that continues within it. A KV connector loads blocks without any.
"""

import torch
import torch.nn.functional as F

from vllm.config import VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.config.drafter.target import BIAS, WEIGHT, load_warp, warp_here
from vllm.logger import init_logger
from vllm.triton_utils import tl, triton
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.gpu.block_table import BlockTables

from ..input_kernel import HiddenRows, VerifiedBatch
from ..inputs import DraftInputs, TargetStep
from .draft_model import Drafter, ModelInputs

logger = init_logger(__name__)


class Pard2Drafter(Drafter):
    """Feeds tokens, and the target's hidden states that `features` names, projected.

    States are projected before they are distributed to slots: there are fewer of them
    than slots, and kept states are narrower. H is the drafter's hidden size.
    """

    keeps_states = True

    def __init__(self, vllm_config: VllmConfig, device: torch.device):
        super().__init__(vllm_config, device)
        self.features = self.speculative_config.drafter.target_features
        self.tapped_layers = self.features.tapped
        self.fed_hidden_size = self.draft_model_config.get_hidden_size()
        # Allocated here: memory allocated while weights load is lost when an engine
        # sleeps.
        warp = load_warp(warp_here(self.speculative_config))
        size = {"dtype": self.dtype, "device": device}
        self.weight = warp[WEIGHT].to(**size)  # [H, concatenated states]
        self.bias = warp[BIAS].to(**size) if BIAS in warp else None  # [H]
        self.kept: KeptStates | None = None
        self.kv_group = 0
        if vllm_config.kv_transfer_config is not None:
            logger.info(
                "KV that a connector loads comes without the target's hidden states. "
                "PARD-2 drafts without that of its last token; all others are computed "
                "here. Output is not affected."
            )

    def set_kv_cache(
        self, kv_cache_config: KVCacheConfig, block_tables: BlockTables, kv_group: int
    ) -> None:
        self.kv_group = kv_group
        no_state = self._projected(self.weight.new_zeros(self.weight.shape[1]))
        size = block_tables.block_sizes[kv_group]
        self.kept = KeptStates(kv_cache_config.num_blocks, size, no_state)
        logger.info(
            "States of the target kept for PARD-2 take %.3f GiB, beside the KV cache.",
            (self.kept.states.nbytes + self.kept.positions.nbytes) / 2**30,
        )

    def _projected(self, states: torch.Tensor) -> torch.Tensor:
        return F.linear(states, self.weight, self.bias)

    def target_hidden(
        self, last: torch.Tensor, aux: list[torch.Tensor] | None
    ) -> HiddenRows:
        states = dict(zip(self.tapped_layers, aux or (), strict=True))
        states[self.features.depth] = last
        fed = [states[layer] for layer in self.features.layers]
        rows = self._projected(torch.cat(fed, dim=-1))
        if self.kept is None:  # there are no KV blocks while memory is profiled
            return HiddenRows((rows,), rows)
        kept = self.kept
        return HiddenRows((rows,), kept.states, kept.positions, self.kv_group)

    def keep(
        self, step: TargetStep, verified: VerifiedBatch, hidden: HiddenRows, ends: bool
    ) -> None:
        """Keeps `target_hidden` of a step; see `KeptStates.keep`."""
        slots, states = step.slot_mappings[self.kv_group], hidden.sources[0]
        self.kept.keep(verified, slots, states, ends=ends)

    def model_inputs(
        self, inputs: DraftInputs, num_tokens: int, is_first: bool, mode: CUDAGraphMode
    ) -> ModelInputs:
        ids = self.vocabulary.input_ids(inputs.batch.input_ids, num_tokens)
        embeds = self.model.embed_input_ids(ids)
        fed = inputs.hidden_states(num_tokens, is_first)
        embeds = torch.add(embeds, fed, alpha=self.features.scale)
        if mode == CUDAGraphMode.PIECEWISE:
            embeds = inputs.at_lasting_address("inputs_embeds", embeds)
        return {
            "input_ids": None,
            "positions": inputs.positions(num_tokens),
            "inputs_embeds": embeds,
        }

    def feed_back(self, rows: torch.Tensor) -> HiddenRows:
        return HiddenRows((rows,), self.kept.states)


PROGRAMS = 16  # per request; they share the blocks that it fills


class KeptStates:
    """The states of KV blocks; B is the number of blocks, H the width of a state.

    Attributes:
        states: [2 * B, H]. Row 2 * b is of the token that ends block b, row 2 * b + 1
            of the block's last token so far. Row 0, the null block's, is for tokens
            without a preceding state, or whose preceding state is not known.
        positions: [2 * B] int64, of those tokens; -1 if there is none.
    """

    def __init__(self, num_blocks: int, block_size: int, no_state: torch.Tensor):
        """
        Args:
            block_size: tokens of a KV block.
            no_state: [H], taken where there is no state.
        """
        self.block_size = block_size
        self.states = no_state.new_zeros(2 * num_blocks, len(no_state))
        self.states[0] = no_state
        self.positions = torch.full(
            (2 * num_blocks,), -1, dtype=torch.int64, device=no_state.device
        )

    def keep(
        self,
        verified: VerifiedBatch,
        slots: torch.Tensor,
        states: torch.Tensor,
        ends: bool,
    ) -> None:
        """Keeps the states of a step, in the blocks of its valid tokens.

        A request may continue a prefix that another one computes in the same step, so
        states that end blocks are kept before the draft inputs are prepared. The others
        are read while these are prepared, and replaced afterwards.

        Args:
            slots: [at least T] int64, KV slots of the step's tokens. Those of the null
                block keep nothing: warm-up runs while serving have slots there.
            states: [at least T, H], of these tokens.
            ends: keep the states that end blocks; else those of last tokens.
        """
        assert states.is_contiguous() and slots.is_contiguous()
        size = states.shape[1]
        _keep_states_kernel[(len(verified.idx_mapping), PROGRAMS if ends else 1)](
            verified,
            slots,
            states,
            self.states,
            self.positions,
            self.block_size,
            ENDS=ends,
            SIZE=size,
            BLOCK=triton.next_power_of_2(size),
        )


@triton.jit
def _keep_states_kernel(
    verified,  # VerifiedBatch
    slots,
    states,
    kept_states,
    kept_positions,
    block_size,
    ENDS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (r, i) keeps every PROGRAMS-th block end of request r, from the i-th."""
    req = tl.program_id(0)
    begin = tl.load(verified.query_start_loc + req)
    end = tl.load(verified.query_start_loc + req + 1)
    if (begin == end) | (tl.load(verified.idx_mapping + req) < 0):
        return  # padding, or a dummy
    last = end - 1 - tl.load(verified.num_rejected + req)
    start = tl.load(verified.positions + begin)
    col = tl.arange(0, BLOCK)
    first_block, count = start // block_size, 1
    if ENDS:
        count = (start + last - begin + 1) // block_size - first_block
    for i in range(tl.program_id(1), count, tl.num_programs(1)):
        row = last.to(tl.int64)
        if ENDS:
            row = begin + (first_block + i + 1) * block_size - 1 - start
        block = tl.load(slots + row) // block_size
        if block > 0:
            to = 2 * block
            if not ENDS:
                to += 1
            state = tl.load(states + row * SIZE + col, mask=col < SIZE)
            tl.store(kept_states + to * SIZE + col, state, mask=col < SIZE)
            tl.store(kept_positions + to, start + row - begin)
