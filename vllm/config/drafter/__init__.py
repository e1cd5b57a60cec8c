# SPDX-License-Identifier: Apache-2.0
"""What `--speculative-config` and a drafter's files come to: one `DrafterConfig`.

It is resolved once, before weights load, and read as `speculative_config.drafter`.
vLLM's config classes call `resolve.py` and `engine.py`; imports go down this list:

- `resolve.py`: the steps from the settings and the drafter's files to the value.
- `engine.py`: whether the unified speculator drafts, and if not why.
- `weights.py`, `vocabulary.py`, `target.py`: the drafter's files against the target.
- `length.py`: how much is drafted and verified.
- `hub.py`: whether a drafter that is no folder is on the hub.
- `checkpoint.py`: reads the drafter's files; `families.py`: what they say, which tells
  published drafters apart.
- `drafter.py`: the value.

A function `check_…` raises the ValueError that its docstring names.
"""

from .drafter import MAX_NODES, METHODS, DrafterConfig, DrafterName, num_candidates

__all__ = ["MAX_NODES", "METHODS", "DrafterConfig", "DrafterName", "num_candidates"]
