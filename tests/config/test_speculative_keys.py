# SPDX-License-Identifier: Apache-2.0
"""Parsing of --speculative-config."""

from argparse import ArgumentError

import pytest

from vllm.engine.arg_utils import EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

from .specs import engine_config


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"num_spec_tokens": 4}, 'no key "num_spec_tokens": did you mean "num_spec'),
        ({"metod": "eagle3"}, 'no key "metod": did you mean "method"'),
        ({"draft_quantization": "fp8"}, 'quantization" or "quantization"?'),
        ({"tree": "wide"}, 'no key "tree": remove it'),
        ("a/drafter", "must be a JSON object, not"),
        ([{"method": "ngram"}], "must be a JSON object, not"),
    ],
)
def test_unknown_keys_are_refused(given, error: str, models):
    with pytest.raises(ValueError, match=error):
        engine_config(models / "target", given)


def parsed(text: str):
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser(exit_on_error=False))
    return parser.parse_args(["--speculative-config", text]).speculative_config


def test_drafter_name_without_json():
    assert parsed("models/pard") == {"model": "models/pard"}
    assert parsed('{"method": "ngram"}') == {"method": "ngram"}
    assert parsed("None") is None
    with pytest.raises(ArgumentError, match="Expecting property name"):
        parsed("{model: models/pard}")
