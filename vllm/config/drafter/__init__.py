# SPDX-License-Identifier: Apache-2.0
"""Resolves `--speculative-config` and a drafter's files into one `DrafterConfig`.

This is done once, before weights load; the result is `speculative_config.drafter`.
vLLM's config classes call `resolve.py` and `engine.py`; imports go down this list:

- `resolve.py`: the steps from the settings and the drafter's files to the result.
- `engine.py`: whether the unified speculator drafts, and if not why.
- `weights.py`, `vocabulary.py`, `target.py`: check the drafter against the target.
- `length.py`: how much is drafted and verified.
- `hub.py`: whether a drafter that is not a local folder is on the hub.
- `folder.py`, `values.py`: check its folder, and single values of its config.
- `overrides.py`: the user's and vLLM's overrides of its config.
- `verifier.py`: a head that is served alone names its target.
- `checkpoint.py`: reads the drafter's files; `families.py`: interprets them, by the
  families of published drafters.
- `drafter.py`: `DrafterConfig`.

A function `check_…` raises the ValueError that its docstring names.
"""

from .drafter import MAX_NODES, METHODS, DrafterConfig, DrafterName, num_candidates

__all__ = ["MAX_NODES", "METHODS", "DrafterConfig", "DrafterName", "num_candidates"]
