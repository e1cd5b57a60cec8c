# SPDX-License-Identifier: Apache-2.0
"""Seam on `vllm/engine/arg_utils.py`.

Why: a speculative config that is no JSON object, or has a key that nobody knows, ends
    in errors that do not say what to write.
How: its keys are checked, as the user wrote them, before it is made.
Upstream: "[Frontend] Say what is wrong with the keys of --speculative-config".
Until: upstream says it.
"""

from dataclasses import fields

from vllm._upstream import stand_on
from vllm.config import SpeculativeConfig
from vllm.config.draft_checks import check_keys

upstream = stand_on(__name__)
EngineArgs = upstream.EngineArgs
_create_speculative_config = EngineArgs.create_speculative_config


def _create_checked(self: EngineArgs, *args, **kwargs) -> SpeculativeConfig | None:
    if self.speculative_config is not None:
        known = {field.name for field in fields(SpeculativeConfig)}
        check_keys(self.speculative_config, known)
    return _create_speculative_config(self, *args, **kwargs)


EngineArgs.create_speculative_config = _create_checked
