# SPDX-License-Identifier: Apache-2.0
"""Ties of two tokens are distinguished from errors, greedy and seeded."""

import numpy as np
import pytest

from vllm.benchmarks.drafters import compare as compare_module
from vllm.benchmarks.drafters.compare import (
    SEEDED,
    Comparison,
    Expected,
    compare,
    tolerance,
)
from vllm.benchmarks.drafters.engine import Answer
from vllm.platforms import current_platform
from vllm.v1.worker.gpu.spec_decode.noise import keyed_noise

PROMPT, WITHIN = [7, 8, 9], 0.1
GREEDY = {"temperature": 0.0}
ROW = {1: -0.5, 2: -0.55, 3: -3.0}


@pytest.mark.parametrize(
    ("found", "at", "is_tie"),
    [
        ([1, 1, 1], None, None),
        ([1, 2, 5], 1, True),
        ([1, 3, 1], 1, False),
        ([1, 1, 99], 2, False),  # at most as likely as the last of the logprobs
        ([1, 1], 2, False),
        ([1, 1, 1, 1], 3, False),
    ],
)
def test_greedy(found, at, is_tie):
    expected = Expected(PROMPT, Answer([1, 1, 1], [ROW] * 3), GREEDY)
    difference = compare(0, expected, found, WITHIN)
    if at is None:
        assert difference is None
    else:
        assert (difference.at, difference.is_tie) == (at, is_tie)
        assert difference.before == [1] * at


def test_seeded():
    """With the noise that it was sampled with, the expected token is the best."""
    chance, temperature = np.random.default_rng(0), SEEDED["temperature"]
    tokens = np.arange(20)
    for seed in range(50):
        logprobs = chance.normal(size=20) - 3
        noise = keyed_noise(seed, len(PROMPT) - 1, tokens)
        order = np.argsort(logprobs / temperature + noise)
        row = dict(enumerate(logprobs.tolist()))
        drawn = Answer([int(order[-1])], [row])
        expected = Expected(PROMPT, drawn, {**SEEDED, "seed": seed})
        gaps = [expected.gap(0, int(token)) for token in order[::-1]]
        assert gaps == sorted(gaps) and gaps[0] == 0
        close = compare(0, expected, [int(order[-2])], gaps[1] + 1e-9)
        assert close.is_tie
        # Else its own may have been left out of the top-k.
        if logprobs[order[-1]] > logprobs.min() + gaps[1]:
            assert not compare(0, expected, [int(order[-2])], gaps[1] - 1e-9).is_tie


@pytest.mark.parametrize(
    ("own", "found", "is_tie"),
    [
        (0, 9, True),  # kept in place of the last one
        (0, 2, False),  # not the next best
        (1, 0, False),  # likelier than its own, and in the top-k in any case
        (19, 0, True),  # its own may be left out, and then this one is the best
        (19, 2, False),
    ],
)
def test_last_place_of_the_top_k(monkeypatch, own, found, is_tie):
    """Regression: with equal logits of bfloat16, a token in the place of another of the
    same logit counted as an error."""
    noise = {0: 3.0, 1: 2.0, 9: 12.0, 19: 10.0 if own == 19 else 0.0}
    monkeypatch.setattr(
        compare_module, "keyed_noise", lambda seed, at, ids: [noise.get(ids[0], 0.0)]
    )
    # Token 9 ties with the last one, 19, and is not among the likeliest twenty.
    row = {token: -1.0 for token in range(20) if token != 9} | {19: -6.0, 20: -5.5}
    expected = Expected(PROMPT, Answer([own], [row]), {**SEEDED, "seed": 1})
    found = compare(0, expected, [found], WITHIN)
    assert found.is_tie == is_tie


def test_comparison():
    expected = [Expected(PROMPT, Answer([1], [ROW]), GREEDY)] * 2
    answers = [Answer([token]) for token in (1, 2, 3, 1)]  # prompts repeat
    comparison = Comparison()
    comparison.add(expected, answers, WITHIN)
    (tie,), (error,) = comparison.ties, comparison.errors
    assert (comparison.same, tie.request, error.request) == (2, 1, 0)
    assert "2 of 4 the same" in comparison.describe()
    assert "1 DIFFER" in comparison.describe()


def test_tolerance():
    assert tolerance("bfloat16") > tolerance("float16") >= tolerance("float32") > 0
    # On an H200 attention in TF32 had two tokens 0.0016 nats apart change places.
    has_tf32 = not current_platform.is_cpu()
    assert (tolerance("float32") > 0.0016) == has_tf32
