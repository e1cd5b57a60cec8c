# SPDX-License-Identifier: Apache-2.0
"""How many drafts are accepted: synthetic, or from a recording (`traces.py`)."""

from functools import cache

from benchmarks.spec_decode.results import EngineKey
from benchmarks.spec_decode.traces import Trace, tokens_per_step

# Tokens that each draft adds to a step, the same for every mode: 2.5 tokens on average
# with K=3, 3.0 with 5, 3.5 with 7, 4.0 with 11. vLLM's synthetic acceptance gives these
# lengths with as little variance as possible, so that short rounds are comparable. For
# a real drafter with so little variance another K would be best.
GAIN = (0.7, 0.45, 0.35, 0.25, 0.25, 0.25, 0.25, 0.125, 0.125, 0.125, 0.125)
EQUAL = "equal"
RECORDED = "recorded-"


def equal_length(num_drafts: int) -> float:
    """Mean tokens of a step; drafts after the 11th gain as much as the 11th."""
    return 1 + sum((GAIN + GAIN[-1:] * num_drafts)[:num_drafts])


def recording(label: str, key: EngineKey) -> str | None:
    """Name of the recording that an engine replays for a label; None if it has none."""
    if not label.startswith(RECORDED) or key.mode == "none":
        return None
    mode = "pard" if key.mode == "pard2" else key.mode  # no recordings of its own
    return f"{mode}-{label.removeprefix(RECORDED)}"


@cache
def recorded_length(name: str, num_drafts: int, tree: int = 0) -> float:
    """Mean tokens of a step over a whole recording, not just what a round replays."""
    return tokens_per_step(Trace.load(name), num_drafts, tree or None)


def _recorded_of_auto(name: str, depth: int, num_drafts: int) -> float:
    """`recorded_length` of a choice of "auto": nodes of a tree if above `depth`."""
    if num_drafts <= depth:
        return recorded_length(name, num_drafts)
    # Not in vLLM's release.
    from vllm.config.drafter.drafter import depth_with_passes

    if Trace.load(name).continues_best:
        depth = depth_with_passes(num_drafts, depth)
    return recorded_length(name, depth, num_drafts)


def expected_length(
    label: str, key: EngineKey, drafted: dict[int, int]
) -> float | None:
    """Expected tokens per step of a round, by its label's mean acceptance.

    The acceptance of a single round varies more than the differences to be measured;
    its step time does not. None with adaptive verification, since only the round itself
    tells how many drafts its steps verified.

    Args:
        drafted: if the engine chooses, number of steps by how much they drafted: a
            number above K is the nodes of a tree.
    """
    name, k = recording(label, key), key.num_tokens
    if name is None:
        return equal_length(k)
    if key.is_adaptive:
        return None
    if not key.is_auto:
        return recorded_length(name, k, key.tree)
    lengths = {n: _recorded_of_auto(name, k, n) for n in drafted}
    steps = sum(drafted.values())
    return sum(n * lengths[d] for d, n in drafted.items()) / steps if steps else None
