# SPDX-License-Identifier: Apache-2.0
"""EAGLE-3 heads as published, though there are no weights to say so."""


def give_heads_their_own_lm_head() -> None:
    """To be called before an engine loads; the same on either side.

    A published head of a reduced vocabulary brings its own lm_head, which vLLM
    notices when it reads it. Without it the drafter would rank the target's whole
    vocabulary.
    """
    from vllm.model_executor.models.llama_eagle3 import Eagle3LlamaForCausalLM

    Eagle3LlamaForCausalLM.has_own_lm_head = True
