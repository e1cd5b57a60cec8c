# SPDX-License-Identifier: Apache-2.0
"""Exports this tree's changes as patches to the files of the pinned release."""
