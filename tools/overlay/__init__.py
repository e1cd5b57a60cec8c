# SPDX-License-Identifier: Apache-2.0
"""Composes this repository's `vllm/` with the upstream release it is based on."""
