# SPDX-License-Identifier: Apache-2.0
"""The test that tells a distribution from another one, on outcomes drawn here."""

import json
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
import torch

from benchmarks.spec_decode.lossless.__main__ import SIGNIFICANCE, failures
from benchmarks.spec_decode.lossless.chi_square import (
    p_value,
    sampled,
    sequence_chances,
)
from benchmarks.spec_decode.lossless.models import (
    MASK,
    MODES,
    llama_weights,
    noisy,
    write_models,
)
from vllm.config.drafter.checkpoint import get_mask_token_id

ROOT = Path(__file__).resolve().parents[2]
VOCAB, LENGTH = 4, 2
SAMPLES = 20000


@pytest.fixture
def logprobs() -> dict[tuple[int, ...], torch.Tensor]:
    torch.manual_seed(1)
    known = [k for n in range(LENGTH) for k in product(range(VOCAB), repeat=n)]
    return {k: torch.randn(VOCAB).log_softmax(-1) for k in known}


def draw(chances, count: int) -> list[tuple[int, ...]]:
    weights = torch.tensor(list(chances.values()))
    picked = torch.multinomial(weights, count, replacement=True).tolist()
    outcomes = list(chances)
    return [outcomes[i] for i in picked]


def test_chances_of_all_outputs_add_up(logprobs):
    for temperature, top_p in ((0.3, 1.0), (1.0, 0.7)):
        chances = sequence_chances(logprobs, LENGTH, temperature, top_p)
        assert len(chances) == VOCAB**LENGTH
        assert sum(chances.values()) == pytest.approx(1)


def test_top_p_keeps_the_token_that_crosses_it():
    logprobs = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    kept = sampled(logprobs.double(), 1.0, 0.7)
    assert kept.tolist() == pytest.approx([0.625, 0.375, 0, 0])


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.5])
def test_own_distribution_passes_and_others_do_not(logprobs, temperature: float):
    chances = sequence_chances(logprobs, LENGTH, temperature)
    outcomes = draw(chances, 20000)
    assert p_value(outcomes, chances) > 1e-3
    other = sequence_chances(logprobs, LENGTH, temperature * 1.3)
    assert p_value(outcomes, other) < 1e-4


@pytest.mark.parametrize("temperature", [0.3, 0.7, 1.0, 1.5])
@pytest.mark.parametrize("rest", ["max(p - q, 0)", "p"])
def test_replacements_from_the_whole_target_are_found(temperature: float, rest: str):
    """A subtle wrong rule: drafts are accepted rightly, and replaced from p itself."""
    torch.manual_seed(2)
    p, q = (sampled(one, temperature, 1.0) for one in target_and_drafter())
    left = p if rest == "p" else (p - q).clamp(min=0)
    drafts = torch.multinomial(q, SAMPLES, replacement=True)
    accepted = torch.rand(SAMPLES) < p[drafts] / q[drafts]
    replaced = torch.multinomial(left, SAMPLES, replacement=True)
    outcomes = [(token,) for token in torch.where(accepted, drafts, replaced).tolist()]
    assert 0.7 < accepted.float().mean() < 0.95
    found = p_value(outcomes, {(token,): float(p[token]) for token in range(len(p))})
    assert (found > SIGNIFICANCE) == (rest != "p")


def target_and_drafter() -> list[torch.Tensor]:
    """[V] float64 logits each, of the proof's models, after what they disagree on most.

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


def test_impossible_output_is_found(logprobs):
    chances = sequence_chances(logprobs, LENGTH, 1.0, top_p=0.5)
    impossible = next(tokens for tokens, chance in chances.items() if chance == 0)
    assert p_value([*draw(chances, 100), impossible], chances) == 0


def test_too_few_outcomes_tell_nothing(logprobs):
    chances = sequence_chances(logprobs, LENGTH, 1.5)
    with pytest.raises(ValueError, match="raise --samples"):
        p_value(draw(chances, 6), chances)


def row(p_value: float, length: float | None = 2.0, is_judged: bool = True):
    return {
        "p_value": p_value,
        "acceptance_length": length,
        "is_judged": is_judged,
    }


def test_wrong_rule_must_fail():
    good, bad = row(0.5), row(1e-9)
    assert failures({"pard/greedy/T1.0": good, "wrong rule/pard/T1.0": bad}) == []
    wrong = failures({"pard/greedy/T1.0": bad, "wrong rule/pard/T1.0": good})
    assert wrong == [
        "pard/greedy/T1.0 is not the target's distribution",
        "wrong rule/pard/T1.0 is not found out",
    ]


def test_drafters_must_be_right_often():
    rows = {
        "target/T1.0": row(0.5, None),
        "pard/greedy/T1.0": row(0.5, 1.19),
        "pard/greedy/T1.5": row(0.5, 1.19, is_judged=False),
        "pard/probabilistic/T1.0": row(0.5, 1.2),
    }
    assert failures(rows) == ["pard/greedy/T1.0 has acceptance length 1.19"]


def test_parallel_drafters_name_a_mask(tmp_path):
    folders = write_models(tmp_path)
    for mode in MODES:
        config = json.loads((folders[mode] / "config.json").read_text())
        mask = get_mask_token_id(config)
        assert mask == (MASK if mode.startswith("p") else None)


def test_outputs_of_an_engine(on_cpu: bool, engine_env, tmp_path: Path):
    """The proof itself, in small: PARD with drawn drafts; a grammar takes half of them.

    If the first that it takes were not verified, p would be about 1e-5. The wrong rule
    must be found out, else the program fails.
    """
    output = tmp_path / "lossless.json"
    command = [sys.executable, "-m", "benchmarks.spec_decode.lossless"]
    command += ["--device", "cpu" if on_cpu else "cuda", "--samples", "200"]
    command += ["--modes", "pard", "--methods", "probabilistic"]
    command += ["--settings", "T1.0/grammar", "--no-alone"]
    command += ["--engines-at-once", "1", "--output", str(output)]
    done = subprocess.run(
        command, cwd=ROOT, env=engine_env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    tests = json.loads(output.read_text())["measurements"]
    engines = ("pard/probabilistic", "wrong rule/pard")
    assert set(tests) == {f"{name}/T1.0/grammar" for name in engines}
