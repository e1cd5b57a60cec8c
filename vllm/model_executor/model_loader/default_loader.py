# SPDX-License-Identifier: Apache-2.0
"""Seam on `vllm/model_executor/model_loader/default_loader.py`.

Why: the base refuses some published drafters for the names of their tensors, and lets
    a drafter's missing tensors pass: what was not loaded drafts garbage.
How: tensors of a draft model come under the names and in the shapes that the base
    takes, and a parameter that none of them filled is an error.
Upstream: "[Spec Decode] Load draft checkpoints as published, and all of them".
Until: upstream checks what a drafter has loaded.
"""

from vllm._upstream import stand_on

from .draft_weights import DraftWeights

upstream = stand_on(__name__)


class DefaultModelLoader(upstream.DefaultModelLoader):
    def load_weights(self, model, model_config) -> None:
        if model_config.runner_type != "draft":
            return super().load_weights(model, model_config)
        self.draft_weights = DraftWeights(model, model_config)
        with self.draft_weights.checked():
            super().load_weights(model, model_config)

    def get_all_weights(self, model_config, model):
        weights = super().get_all_weights(model_config, model)
        draft = getattr(self, "draft_weights", None)
        return weights if draft is None else draft.adapted(weights)


upstream.DefaultModelLoader = DefaultModelLoader
