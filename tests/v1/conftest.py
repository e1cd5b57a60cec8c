# SPDX-License-Identifier: Apache-2.0
"""Imports what Runner V2's modules need before they are imported."""

from vllm.platforms import current_platform

if current_platform.is_cpu():
    import vllm.v1.worker.cpu.shm  # noqa: F401  (stands in for CUDA's streams)
