# SPDX-License-Identifier: Apache-2.0
"""What a SpeculativeConfig of ours does beyond the base's."""

from typing import Any

# Methods by another name, where they draft several tokens per pass.
PARALLEL_MODES = {"draft_model": "pard", "eagle3": "peagle"}


class DraftSettings:
    """Mixed into the base's config, where its fields stand.

    Once `known_method` is set, the method is not guessed anew by words in a path.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "method":
            value = self.__dict__.get("known_method") or value
        super().__setattr__(name, value)

    @property
    def drafting_width(self) -> int:
        """Tokens drafted per pass: 1 for autoregressive drafting."""
        if not self.parallel_drafting:
            return 1
        return self.parallel_drafting_width or self.num_speculative_tokens

    @property
    def drafting_mode(self) -> str:
        """What metrics call the way it drafts: the method, PARD or P-EAGLE."""
        if "PARD-2" in (getattr(self, "draft_family", None) or ""):
            return "pard2"
        if self.parallel_drafting:
            return PARALLEL_MODES.get(self.method, self.method)
        return self.method


def hash_with_features(spec: Any, known: str) -> str:
    """The base's hash, and the layers that the target's graph hands out beside."""
    features = getattr(spec, "target_features", None)
    return f"{known}{(features.tapped if features else ()) or ''}"
