# SPDX-License-Identifier: Apache-2.0
"""Upstream's own tests, run on the pinned release and on this tree."""
