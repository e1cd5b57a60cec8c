# SPDX-License-Identifier: Apache-2.0
"""Attention on a CPU is hidden in a custom op only from a compiler."""

import pytest

from vllm.config import (
    CompilationConfig,
    CompilationMode,
    VllmConfig,
    set_current_vllm_config,
)
from vllm.platforms import current_platform

pytestmark = pytest.mark.skipif(not current_platform.is_cpu(), reason="needs a CPU")


@pytest.mark.parametrize("mode", CompilationMode)
def test_only_a_compiler_needs_the_op(mode: CompilationMode):
    config = VllmConfig(compilation_config=CompilationConfig(mode=mode))
    # The platform may have chosen another mode.
    mode = config.compilation_config.mode
    with set_current_vllm_config(config):
        is_opaque = current_platform.opaque_attention_op()
    assert is_opaque == (mode != CompilationMode.NONE)


def test_opaque_if_nothing_is_configured():
    assert current_platform.opaque_attention_op()
