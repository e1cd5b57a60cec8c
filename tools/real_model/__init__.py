# SPDX-License-Identifier: Apache-2.0
"""A small real model, and drafters for it: see `docs/real-model.md`."""
