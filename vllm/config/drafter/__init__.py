# SPDX-License-Identifier: Apache-2.0
"""Resolves `--speculative-config` and a drafter's files into one `DrafterConfig`.

This is done once, before weights load; the result is `speculative_config.drafter`. What
the engine measures later is a second value, `StepTimes`. Imports go down this list:

- `resolve.py`: the steps from the settings and the drafter's files to the result.
- `weights.py`, `target.py`: check the drafter against the target.
- `support.py`: whether the unified speculator drafts, and what the engine supports.
- `length.py`: how much is drafted and verified.
- `files.py`: finds and reads the drafter's files; `families.py`: interprets its
  config.json, by the families of published drafters.
- `drafter.py`: the two values.

To refuse is to raise a ValueError that says what to change: every `check_…` does.
"""

from .drafter import (
    MAX_NODES,
    METHODS,
    OWN_CHECKPOINTS,
    DrafterConfig,
    DrafterName,
    num_candidates,
)

__all__ = [
    "MAX_NODES",
    "METHODS",
    "OWN_CHECKPOINTS",
    "DrafterConfig",
    "DrafterName",
    "num_candidates",
]
