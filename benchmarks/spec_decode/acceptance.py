# SPDX-License-Identifier: Apache-2.0
"""How many drafts are accepted: of a chosen length, or recorded (`traces.py`)."""

from functools import cache

from benchmarks.spec_decode.results import EngineKey
from benchmarks.spec_decode.traces import Trace, tokens_per_step

# Tokens that each draft adds to a step, the same for every mode: 2.5 tokens on average
# with K=3, 3.0 with 5, 3.5 with 7, 4.0 with 11. vLLM accepts these lengths with as
# little chance in them as there can be, so that short rounds compare well; a drafter
# that is this even would be best at another K.
GAIN = (0.7, 0.45, 0.35, 0.25, 0.25, 0.25, 0.25, 0.125, 0.125, 0.125, 0.125)
EQUAL = "equal"
RECORDED = "recorded-"


def equal_length(num_drafts: int) -> float:
    """Mean tokens of a step that drafts so many, its end drawn out for more than 11."""
    return 1 + sum((GAIN + GAIN[-1:] * num_drafts)[:num_drafts])


def recording(label: str, key: EngineKey) -> str | None:
    """Name of the recording that a label means for an engine; None without one."""
    if not label.startswith(RECORDED) or key.mode == "none":
        return None
    mode = "pard" if key.mode == "pard2" else key.mode  # which has none of its own
    return f"{mode}-{label.removeprefix(RECORDED)}"


@cache
def recorded_length(name: str, num_drafts: int, tree: int = 0) -> float:
    """Mean tokens of a step over a whole recording, whatever part a round replays."""
    return tokens_per_step(Trace.load(name), num_drafts, tree or None)


def expected_length(
    label: str, key: EngineKey, drafted: dict[int, int]
) -> float | None:
    """Mean tokens of a round's steps, had it accepted just what is to be expected.

    How many drafts a round happens to accept varies by more than what is compared;
    how long its steps are does not. None with adaptive verification: only the round
    itself says how much its steps verified.

    Args:
        drafted: steps by how much they drafted, nodes of a tree if more than K, where
            an engine chooses that.
    """
    name, k = recording(label, key), key.num_tokens
    if name is None:
        return equal_length(k)
    if key.is_adaptive:
        return None
    if not key.is_auto:
        return recorded_length(name, k, key.tree)
    lengths = {n: recorded_length(name, min(n, k), n * (n > k)) for n in drafted}
    steps = sum(drafted.values())
    return sum(n * lengths[d] for d, n in drafted.items()) / steps if steps else None
