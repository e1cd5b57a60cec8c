# SPDX-License-Identifier: Apache-2.0
"""Keys of --speculative-config, as the user wrote them."""

import pytest

from .specs import engine_config


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"num_spec_tokens": 4}, 'no key "num_spec_tokens": did you mean "num_spec'),
        ({"metod": "eagle3"}, 'no key "metod": did you mean "method"'),
        ({"tree": "wide"}, 'no key "tree": remove it'),
        ("a/drafter", "must be a JSON object, not"),
        ([{"method": "ngram"}], "must be a JSON object, not"),
    ],
)
def test_what_nobody_knows_is_refused(given, error: str, models):
    with pytest.raises(ValueError, match=error):
        engine_config(models / "target", given)
