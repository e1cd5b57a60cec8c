# SPDX-License-Identifier: Apache-2.0
"""Which engines `vllm bench drafters` starts, and which arguments it refuses."""

import sys
from argparse import Namespace
from types import SimpleNamespace
from typing import Any

import pytest

from vllm.benchmarks.drafters import command
from vllm.benchmarks.drafters.plan import plan_sides
from vllm.config.drafter import DrafterConfig
from vllm.config.drafter.length import AutoSchedule, candidate_lengths
from vllm.utils.argparse_utils import FlexibleArgumentParser

DEPTH = 8


def resolve(spec: dict[str, Any] | None) -> SimpleNamespace:
    """A fake engine config: "auto" unless the spec says how much to draft."""
    if spec is None:
        return SimpleNamespace(use_v2_model_runner=True)
    length = spec.get("num_speculative_tokens")
    schedule = AutoSchedule(candidate_lengths(DEPTH, 63))
    drafter = DrafterConfig("draft_model", length or DEPTH, is_unified=True)
    is_auto = not (length or spec.get("draft_tree") or spec.get("method") == "fixed")
    resolved = SimpleNamespace(
        drafter=drafter,
        num_speculative_tokens=length or DEPTH,
        num_speculative_tokens_per_batch_size=schedule if is_auto else None,
        rejection_sample_method=spec.get("rejection_sample_method", "standard"),
    )
    return SimpleNamespace(speculative_config=resolved)


def flags(**given: Any) -> Namespace:
    usual = {"num_speculative_tokens": None, "draft_tree": None}
    return Namespace(**usual | given)


@pytest.mark.parametrize(
    ("spec", "given", "settings"),
    [
        ({}, {}, ["auto"]),
        ({}, {"num_speculative_tokens": [2, 15], "draft_tree": [31]},
         ["auto", "K=2", "K=15", "tree of 31"]),
        ({"num_speculative_tokens": 5}, {"num_speculative_tokens": [2]}, ["K=5"]),
        ({"method": "fixed"}, {}, ["K=8"]),  # it has no "auto"
    ],
)  # fmt: skip
def test_sides(spec, given, settings):
    spec = {"model": "a/b"} | spec
    none, *sides, again = plan_sides([spec], flags(**given), resolve)
    assert none.spec is again.spec is None and again.setting == "again"
    assert [side.setting for side in sides] == settings
    for side in sides:
        assert side.drafter == "b" and side.is_lossless
        # The spec says how much to draft, unless the drafter does.
        length = side.spec.get("num_speculative_tokens")
        assert length in (None, side.depth)


def test_names_and_synthetic_acceptance():
    specs = [{"model": "a/b"}, {"method": "ngram"}, {"model": "c/b"}]
    specs.append({"model": "a/b", "draft_tree": 15})
    specs.append({"model": "a", "rejection_sample_method": "synthetic"})
    sides = plan_sides(specs, flags(), resolve)[1:-1]
    names = ["b (1) auto", "ngram auto", "b (2) auto", "b tree of 15", "a auto"]
    assert [side.name for side in sides] == names
    assert [side.is_lossless for side in sides] == [True] * 4 + [False]


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ("--model m", "needs --drafter"),
        ("--drafter d", "needs --model"),
        ("--output-len 0", "--output-len must be at least 1"),
        ("--num-speculative-tokens 0 3", "--num-speculative-tokens must be at least 1"),
        ("--concurrency 0 8", "--concurrency must be at least 1"),
        ("--concurrency 8 --max-num-seqs 4", "as high a --max-num-seqs"),
        ("--data-parallel-size 2", "--data-parallel-size is not supported"),
        ("--model m --drafter 3", "a JSON object"),
        ("--spec-model d", "--drafter"),
        ("--json no/such/folder.json", "no such folder"),
        ("--model {models}/target --drafter {{no", "not valid JSON"),
        ("--model {models}/target --drafter ./no/folder", "no/folder"),
        ("--output-len 9999", "lower --output-len"),
        (
            "--model {models}/targit --drafter {models}/pard",
            'such as "{models}/target"',
        ),
        ("--model m --drafter d --dataset-path p.jsonl", "needs --dataset-name"),
    ],
)
def test_bad_input(models, monkeypatch, capsys, given, error):
    """One error line, and no engine starts."""
    monkeypatch.setattr(command, "run", lambda *job: pytest.fail("an engine starts"))
    words = given.format(models=models).split()
    monkeypatch.setattr(sys, "argv", ["vllm", "bench", "drafters", *words])
    with pytest.raises(SystemExit) as ended:
        command.main(command.parse(words))
    assert ended.value.code == 2
    (line,) = (s for s in capsys.readouterr().err.splitlines() if "error: " in s)
    assert error.format(models=models) in line


def test_help_has_the_flags_of_the_command_first():
    parser = FlexibleArgumentParser(description="Compare drafters.")
    command.add_cli_args(parser)
    text = parser.format_help()
    assert text.index("folder, hub id") < text.index("Config Groups")


def test_engine_flags():
    words = "--model m -tp 2 --drafter a b --quick --dtype half"
    assert command.engine_flags(words.split()) == ["-tp", "2", "--dtype", "half"]
