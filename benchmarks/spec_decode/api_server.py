# SPDX-License-Identifier: Apache-2.0
"""The `vllm` command for dummy weights: `python -m benchmarks.spec_decode.api_server`.

What is below runs in the engine's process too, which starts with this module.
"""

from benchmarks.spec_decode.models import give_heads_their_own_lm_head

give_heads_their_own_lm_head()

if __name__ == "__main__":
    from vllm.entrypoints.cli.main import main

    main()
