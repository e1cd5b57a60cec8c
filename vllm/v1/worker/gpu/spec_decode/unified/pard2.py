# SPDX-License-Identifier: Apache-2.0
"""PARD-2: a draft model whose embeddings the target's hidden states are added to.

A token is fed the state of the token before it, so that the next token's is known
already; `layout.py` says how states and slots are paired.
"""

from typing import Any

import torch
import torch.nn.functional as F

from vllm.config import VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.config.draft_features import BIAS, WEIGHT, load_warp, warp_here
from vllm.logger import init_logger

from .draft_model import DraftModelDrafter
from .inputs import HiddenRows

logger = init_logger(__name__)


class Pard2Drafter(DraftModelDrafter):
    """Feeds tokens, and what `features` names of the target, projected.

    States are projected before they are laid out: there are fewer of them than slots,
    and what is kept of them is narrower. H is the drafter's hidden size.
    """

    def __init__(self, vllm_config: VllmConfig, device: torch.device):
        spec = vllm_config.speculative_config
        self.features = spec.target_features
        self.fed_hidden_size = spec.draft_model_config.get_hidden_size()
        super().__init__(vllm_config, device)
        # Allocated here: what is allocated while weights load is lost when an engine
        # sleeps.
        warp = load_warp(warp_here(spec))
        size = {"dtype": self.dtype, "device": device}
        self.weight = warp[WEIGHT].to(**size)  # [H, states side by side]
        self.bias = warp[BIAS].to(**size) if BIAS in warp else None  # [H]
        # By KV block, the state of its last token, [1 + blocks, H]: where a request
        # goes on from there, or from a cached prefix, it is slot 0's. Row 0 takes what
        # is not kept; the null block's, row 1, is for position 0.
        self.kept: torch.Tensor | None = None
        self.kv_group = 0
        if vllm_config.kv_transfer_config is not None:
            logger.warning(
                "KV that a connector loads comes without the hidden states of the "
                "target that PARD-2 is fed behind it: the first drafts after such KV "
                "may be worse. Text is not affected."
            )

    @property
    def tapped_layers(self) -> tuple[int, ...]:
        """Layers whose states the target is to hand out beside its output."""
        return self.features.tapped

    def set_attn(self, model_state: Any, kv_cache_config: Any, *args: Any) -> None:
        super().set_attn(model_state, kv_cache_config, *args)
        groups = enumerate(self.attn_groups)
        self.kv_group = next(number for number, layers in groups if layers)
        rows = 1 + kv_cache_config.num_blocks
        self.kept = self.weight.new_zeros(rows, self.fed_hidden_size)
        nothing = self.weight.new_zeros(1, self.weight.shape[1])
        self.kept[1] = self._projected(nothing)
        logger.info(
            "States of the target kept for PARD-2 take %.3f GiB, beside the KV cache.",
            self.kept.nbytes / 2**30,
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
        # While memory is profiled there are no blocks.
        kept = rows if self.kept is None else self.kept[1:]
        return HiddenRows((rows,), kept, self.kv_group)

    def fed_back(self, rows: torch.Tensor) -> HiddenRows:
        return HiddenRows((rows,), self.kept)

    def _run_first_pass(self, verified, hidden, batch, *args) -> None:
        self._keep_ends_of_blocks(hidden.sources[0][: batch.num_tokens])
        super()._run_first_pass(verified, hidden, batch, *args)

    def _keep_ends_of_blocks(self, rows: torch.Tensor) -> None:
        """Keeps the states of tokens that end a KV block, for whoever goes on there.

        That may be a request of this very batch, so it is done first. A rejected
        token's is written over before its block is anyone else's. The null block's
        stays: an engine that warms up while it serves writes there.
        """
        size = self.block_tables.block_sizes[self.kv_group]
        ends = self.block_tables.slot_mappings[self.kv_group, : len(rows)] + 1
        is_end = (ends % size == 0) & (ends > size)
        block = torch.where(is_end, ends // size, 0)
        self.kept.index_copy_(0, block, rows)

    def model_inputs(
        self, num_tokens: int, is_first: bool, mode: CUDAGraphMode
    ) -> dict[str, torch.Tensor | None]:
        buffers = self.input_buffers
        embeds = self.model.embed_input_ids(buffers.input_ids[:num_tokens])
        fed = self._fed(num_tokens, is_first)
        embeds = torch.add(embeds, fed, alpha=self.features.scale)
        if mode == CUDAGraphMode.PIECEWISE:
            embeds = buffers.at_lasting_address(embeds)
        return {
            "input_ids": None,
            "positions": buffers.positions[:num_tokens],
            "inputs_embeds": embeds,
        }

    def _fed(self, num_tokens: int, is_first: bool) -> torch.Tensor:
        buffers = self.input_buffers
        return (buffers.fed if is_first else buffers.own_rows)[:num_tokens]

    def _forward(
        self, num_tokens: int, is_first: bool, *args: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns what is sampled from, and what was fed: that is fed on, since of a
        draft the target has no state yet."""
        output, _ = super()._forward(num_tokens, is_first, *args)
        return output, self._fed(num_tokens, is_first)
