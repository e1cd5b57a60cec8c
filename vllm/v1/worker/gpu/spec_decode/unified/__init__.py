# SPDX-License-Identifier: Apache-2.0
"""One speculator for every kind of draft model, on Model Runner V2.

`speculator.py` has the draft step (`propose`), and makes its parts: `inputs.py`, what
the target verified and a pass reads; `runner.py`, the draft model and its CUDA graphs;
`sampler.py`, the drafts. `layout.py` defines the slots of a draft batch, `drafters/`
the families, `tree/` draft trees.
"""
