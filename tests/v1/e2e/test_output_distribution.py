# SPDX-License-Identifier: Apache-2.0
"""Sampled output against the target's exact distribution, by chi-square.

The target has a vocabulary so small that each output of three tokens has its own count.
Its exact distribution comes from its logits after every possible beginning, in plain
PyTorch. A drafter that is seldom right would prove little, so its acceptance length is
looked at too; and a rule that takes any draft must be found out by the same test.

`VLLM_TEST_SAMPLES` is how many outputs are drawn of each setting.
"""

import os
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from .chi_square import Sequence, p_value, sampled, sequence_chances
from .conftest import RunJob
from .oracle import load_model
from .test_unified_speculator import only_fast
from .tiny_vocabulary import MODES, VOCAB, WORDS, llama_weights, noisy, write_models

PROMPT = [1, 2]
LENGTH = 3
NUM_DRAFTS = 3
# So that of all tests together one in some hundred runs would fail by chance.
SIGNIFICANCE = 1e-4
# What drafters reach, up to this temperature.
LEAST_ACCEPTANCE_LENGTH, WARMEST = 1.2, 1.0
SETTINGS: dict[str, dict[str, Any]] = {
    **{f"T{t}": {"temperature": t} for t in (0.3, 0.7, 1.0, 1.5)},
    "T1.0 top-p 0.7": {"temperature": 1.0, "top_p": 0.7},
    "T1.0 seeded": {"temperature": 1.0, "seed": 0},
    # The tokens for each place. Half of what drafters draw behind the first is none of
    # them, and of the rest nearly all is token 4.
    "T1.0 grammar": {
        "temperature": 1.0,
        "grammar": ((4,), (1, 4), (1, 4)),
        "logit_bias": {4: -1.0},
    },
}
METHODS = {
    "greedy": {"draft_sample_method": "greedy"},
    "probabilistic": {"draft_sample_method": "probabilistic"},
    "block": {
        "draft_sample_method": "probabilistic",
        "rejection_sample_method": "block",
    },
    "tree": {"draft_tree": 8},
}
PARALLEL = ("pard", "pard2", "peagle", "peagle-small")
WRONG_RULE = {
    "rejection_sample_method": "synthetic",
    "synthetic_acceptance_rates": [1.0] * NUM_DRAFTS,
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    return write_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def logprobs(folders) -> dict[Sequence, torch.Tensor]:
    """[V] by what was generated so far, the empty sequence included."""
    target = load_model(folders["target"])
    known = [k for n in range(LENGTH) for k in product(range(VOCAB), repeat=n)]
    with torch.inference_mode():
        logits = {k: target(torch.tensor([PROMPT + list(k)])).logits for k in known}
    return {k: found[0, -1].log_softmax(-1) for k, found in logits.items()}


def chances_of(
    setting: dict[str, Any], logprobs: dict[Sequence, torch.Tensor]
) -> dict[Sequence, float]:
    """Of every output, as bias and grammar of a setting leave them."""
    asked = {known: row.clone() for known, row in logprobs.items()}
    for known, row in asked.items():
        for token, bias in setting.get("logit_bias", {}).items():
            row[token] += bias
        if "grammar" in setting:
            allowed = setting["grammar"][len(known)]
            row[[token for token in range(VOCAB) if token not in allowed]] = -torch.inf
    temperature, top_p = setting["temperature"], setting.get("top_p", 1.0)
    return sequence_chances(asked, LENGTH, temperature, top_p)


def requests(setting: dict[str, Any], count: int) -> Iterator[dict[str, Any]]:
    """So many of a setting; a grammar is written as a regular expression."""
    sampling = {"detokenize": False} | setting
    if grammar := sampling.pop("grammar", None):
        places = ("".join(WORDS[token] for token in place) for place in grammar)
        regex = "".join(f"[{place}]" for place in places)
        sampling["structured_outputs"] = {"regex": regex}
    for number in range(count):
        own = {"seed": number} if "seed" in setting else {}
        yield {"prompt": PROMPT, "max_tokens": LENGTH, "sampling": sampling | own}


@pytest.fixture(scope="module")
def count(on_cpu: bool) -> int:
    return int(os.environ.get("VLLM_TEST_SAMPLES", 200 if on_cpu else 20000))


@pytest.fixture(scope="module")
def draw(run_job: RunJob, folders, count: int):
    """Outputs of an engine with such a drafter, by setting, and what it accepted."""

    def drawn(mode: str, settings: dict[str, Any], **spec: Any) -> dict[str, Any]:
        spec |= {"model": str(folders[mode]), "num_speculative_tokens": NUM_DRAFTS}
        spec["method"] = "eagle3" if "eagle" in mode else "draft_model"
        engine = {
            "model": str(folders["target"]),
            "speculative_config": spec,
            "max_model_len": 32,
            "max_num_seqs": min(count, 256),
            "seed": 0,
        }
        asked = {name: list(requests(one, count)) for name, one in settings.items()}
        result = run_job({"engine": engine, "scenarios": asked})
        assert "error" not in result, result["log"][-6000:]
        return result["scenarios"]

    return drawn


def combinations() -> Iterator[Any]:
    """Each mode with each method; one of them is fast."""
    for mode, method in product(MODES, METHODS):
        if method != "tree" or mode in PARALLEL:
            is_fast = (mode, method) == ("pard", "probabilistic")
            yield pytest.param(mode, method, marks=() if is_fast else pytest.mark.slow)


@pytest.mark.parametrize("mode, method", list(combinations()))
def test_output_has_the_targets_distribution(
    draw, logprobs, on_cpu: bool, mode: str, method: str
):
    """If the first draft that a grammar takes were not verified, p would be 1e-5."""
    settings = SETTINGS
    if on_cpu:  # the one that finds out most with few outputs
        settings = {"T1.0 grammar": SETTINGS["T1.0 grammar"]}
    for name, found in draw(mode, settings, **METHODS[method]).items():
        chances = chances_of(SETTINGS[name], logprobs)
        assert p_value(map(tuple, found["tokens"]), chances) > SIGNIFICANCE, name
        counters = found["counters"]
        (drafts,), (accepted,) = counters["num_drafts"], counters["num_accepted_tokens"]
        if SETTINGS[name]["temperature"] <= WARMEST and "grammar" not in name:
            assert 1 + accepted / drafts > LEAST_ACCEPTANCE_LENGTH, name


@pytest.mark.parametrize("mode", only_fast(("draft", "pard", "eagle3"), "pard"))
def test_a_wrong_rule_is_found_out(draw, logprobs, mode: str):
    name = "T1.0 grammar"
    found = draw(mode, {name: SETTINGS[name]}, **WRONG_RULE)[name]
    chances = chances_of(SETTINGS[name], logprobs)
    assert p_value(map(tuple, found["tokens"]), chances) < SIGNIFICANCE


# The test itself, on outcomes drawn here.


@pytest.fixture
def some_logprobs() -> dict[Sequence, torch.Tensor]:
    torch.manual_seed(1)
    known = [k for n in range(2) for k in product(range(4), repeat=n)]
    return {k: torch.randn(4).log_softmax(-1) for k in known}


def outcomes_of(chances: dict[Sequence, float], count: int) -> list[Sequence]:
    weights = torch.tensor(list(chances.values()))
    picked = torch.multinomial(weights, count, replacement=True).tolist()
    outcomes = list(chances)
    return [outcomes[i] for i in picked]


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.5])
def test_own_distribution_passes_and_others_do_not(some_logprobs, temperature: float):
    chances = sequence_chances(some_logprobs, 2, temperature)
    assert sum(chances.values()) == pytest.approx(1)
    outcomes = outcomes_of(chances, 20000)
    assert p_value(outcomes, chances) > 1e-3
    other = sequence_chances(some_logprobs, 2, temperature * 1.3)
    assert p_value(outcomes, other) < 1e-4


def test_top_p_keeps_the_token_that_crosses_it():
    logprobs = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    kept = sampled(logprobs.double(), 1.0, 0.7)
    assert kept.tolist() == pytest.approx([0.625, 0.375, 0, 0])


@pytest.mark.parametrize("temperature", [0.3, 0.7, 1.0, 1.5])
@pytest.mark.parametrize("rest", ["max(p - q, 0)", "p"])
def test_replacements_from_the_whole_target_are_found(temperature: float, rest: str):
    """A subtle wrong rule: drafts are accepted rightly, and replaced from p itself."""
    p, q = (sampled(one, temperature, 1.0) for one in target_and_drafter())
    torch.manual_seed(2)
    left = p if rest == "p" else (p - q).clamp(min=0)
    drafts = torch.multinomial(q, 20000, replacement=True)
    accepted = torch.rand(20000) < p[drafts] / q[drafts]
    replaced = torch.multinomial(left, 20000, replacement=True)
    outcomes = [(token,) for token in torch.where(accepted, drafts, replaced).tolist()]
    assert 0.7 < accepted.float().mean() < 0.95
    found = p_value(outcomes, {(token,): float(p[token]) for token in range(len(p))})
    assert (found > SIGNIFICANCE) == (rest != "p")


def target_and_drafter() -> list[torch.Tensor]:
    """[V] float64 logits each, of these models, after what they disagree on most.

    What layers add is left out, so that one token is all that they depend on.
    """
    torch.manual_seed(0)
    target = llama_weights()
    logits = []
    for weights in (target, noisy(target)):
        embedding = weights["model.embed_tokens.weight"][-1]
        normed = embedding / embedding.square().mean().sqrt()
        logits.append((weights["lm_head.weight"] @ normed).double())
    return logits


def test_impossible_output_is_found(some_logprobs):
    chances = sequence_chances(some_logprobs, 2, 1.0, top_p=0.5)
    impossible = next(tokens for tokens, chance in chances.items() if chance == 0)
    assert p_value([*outcomes_of(chances, 100), impossible], chances) == 0


def test_too_few_outcomes_tell_nothing(some_logprobs):
    chances = sequence_chances(some_logprobs, 2, 1.5)
    with pytest.raises(ValueError, match="too few"):
        p_value(outcomes_of(chances, 6), chances)
