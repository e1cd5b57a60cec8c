# SPDX-License-Identifier: Apache-2.0
"""What metrics call the way a config drafts."""

import pytest

from vllm.config.draft_settings import DraftSettings


@pytest.mark.parametrize(
    "method, parallel, family, mode",
    [
        ("draft_model", False, None, "draft_model"),
        ("draft_model", True, None, "pard"),
        ("draft_model", True, "PARD", "pard"),
        ("draft_model", True, "PARD-2", "pard2"),
        ("eagle", False, None, "eagle"),
        ("eagle3", False, "EAGLE-3, SafeAILab", "eagle3"),
        ("eagle3", True, "P-EAGLE, Amazon", "peagle"),
        ("ngram", False, None, "ngram"),
        ("dflash", True, None, "dflash"),
    ],
)
def test_mode(method, parallel, family, mode):
    spec = DraftSettings()
    spec.method, spec.parallel_drafting, spec.draft_family = method, parallel, family
    assert spec.drafting_mode == mode
