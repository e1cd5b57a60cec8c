# SPDX-License-Identifier: Apache-2.0
"""Exports this tree's change as patches on the files of the release it stands on."""
