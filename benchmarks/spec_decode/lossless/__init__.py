# SPDX-License-Identifier: Apache-2.0
"""Is sampled output distributed as the target's own? Counted: see `__main__.py`."""
