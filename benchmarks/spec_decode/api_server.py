# SPDX-License-Identifier: Apache-2.0
"""The `vllm` command for dummy weights: `python -m benchmarks.spec_decode.api_server`.

The module level also runs in the engine's process, which imports this module first.
"""

import os

from benchmarks.spec_decode.models import give_heads_their_own_lm_head
from benchmarks.spec_decode.trace_acceptance import replay_in_every_runner

give_heads_their_own_lm_head()
if name := os.environ.get("SPEC_DECODE_RECORDING"):
    replay_in_every_runner(name)

if __name__ == "__main__":
    from vllm.entrypoints.cli.main import main

    main()
