# SPDX-License-Identifier: Apache-2.0
"""A configuration error is one line that says what to change."""

import json
import sys
import traceback
from argparse import ArgumentError

import pytest
from pydantic import ValidationError

from vllm import LLM
from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.cli.main import main
from vllm.utils.argparse_utils import FlexibleArgumentParser


@pytest.fixture(autouse=True)
def spawn_workers(monkeypatch):
    """Otherwise vLLM chooses "spawn" itself, with a warning, and leaves it set."""
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")


def bench(models, monkeypatch, level: str = "INFO", **spec) -> None:
    """Runs `vllm bench latency` with a drafter that is refused before it loads."""
    spec = {"model": str(models / "pard")} | spec
    given = {"--model": models / "target", "--speculative-config": json.dumps(spec)}
    words = ["--enforce-eager", *(str(word) for pair in given.items() for word in pair)]
    monkeypatch.setattr(sys, "argv", ["vllm", "bench", "latency", *words])
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", level)
    main()


TREES = [
    ({"draft_tree": 0}, "SpeculativeConfig.draft_tree: Input should be greater "),
    ({"draft_tree": 3}, "draft_tree (3) must be from num_speculative_tokens (8),"),
]


@pytest.mark.parametrize(
    "spec, line",
    [
        ({"metod": "a"}, 'speculative_config has no key "metod": did you mean "meth'),
        *TREES,
        ({"method": "padr"}, "SpeculativeConfig.method: did you mean 'pard'? Input"),
    ],
)
def test_command_exits_with_one_line_error(models, monkeypatch, spec: dict, line: str):
    with pytest.raises(SystemExit) as ended:
        bench(models, monkeypatch, **spec)
    assert ended.value.code.startswith(f"error: {line}")
    assert "\n" not in ended.value.code and "pydantic" not in ended.value.code
    assert ("did you mean 'pard'?" in ended.value.code) == ("method" in spec)
    # With debug logging, the error has vLLM's own type, for callers that catch it.
    with pytest.raises(ValidationError):
        bench(models, monkeypatch, level="DEBUG", **spec)


@pytest.mark.parametrize("spec, line", TREES)
def test_traceback_ends_with_one_line_error(models, spec: dict, line: str):
    spec = {"model": str(models / "pard")} | spec
    with pytest.raises(ValidationError) as raised:
        LLM(str(models / "target"), speculative_config=spec, enforce_eager=True)
    told = traceback.format_exception(raised.value)
    assert told[-1].partition(": ")[2].startswith(line)
    assert not any("pydantic.dev" in each for each in told)
    assert any("in create_engine_config" in each for each in told)
    (known,) = raised.value.errors()  # still pydantic's, for callers that catch it
    assert line.removeprefix("SpeculativeConfig.draft_tree: ") in known["msg"]


def parsed(text: str):
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser(exit_on_error=False))
    return parser.parse_args(["--speculative-config", text]).speculative_config


def test_drafter_name_without_json():
    assert parsed("models/pard") == {"model": "models/pard"}
    assert parsed('{"method": "ngram"}') == {"method": "ngram"}
    assert parsed("None") is None
    with pytest.raises(ArgumentError, match="Expecting property name"):
        parsed("{model: models/pard}")


def test_other_errors_are_raised(monkeypatch):
    words = ["serve", "--headless", "--api-server-count", "1"]
    monkeypatch.setattr(sys, "argv", ["vllm", *words])
    with pytest.raises(ValueError, match="cannot be used with --headless"):
        main()
