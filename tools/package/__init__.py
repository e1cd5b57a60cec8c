# SPDX-License-Identifier: Apache-2.0
"""Wheels for release: built from pinned parts, twice, and looked over."""
