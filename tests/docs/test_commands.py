# SPDX-License-Identifier: Apache-2.0
"""Commands of the pages have flags, keys and modules that exist."""

import argparse
import re
import shlex
from importlib.util import find_spec

import pytest

from tests.conftest import ROOT
from vllm.benchmarks.drafters.command import parse
from vllm.config import SpeculativeConfig
from vllm.engine.config_error import check_keys
from vllm.entrypoints.common.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCKS = re.compile(r"^```bash\n(.*?)^```", re.MULTILINE | re.DOTALL)
COMMANDS = {
    tuple(shlex.split(line, comments=True)): None
    for page in PAGES
    for block in BLOCKS.findall(page.read_text())
    for line in re.split(r"\n(?=\S)", block.replace("\\\n", " "))
    if re.match(r"vllm |python -m |pytest ", line)
}


def settings(words: list[str]) -> list[dict]:
    if words[:2] == ["bench", "drafters"]:
        return parse(words[2:]).drafter
    parser = make_arg_parser(FlexibleArgumentParser())
    return [parser.parse_args(words[1:]).speculative_config or {}]


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_commands_of_pages(words: tuple[str, ...], monkeypatch):
    # Of a wrong flag, an error in the place of an exit.
    monkeypatch.setattr(argparse.ArgumentParser, "exit", lambda *why: pytest.fail(why))
    match words:
        case "vllm", *rest if "--version" not in rest:
            for each in settings(rest):
                check_keys(each, SpeculativeConfig)
        case "python", "-m", module, *_:
            assert find_spec(module)
        case "pytest", *rest:
            assert all((ROOT / w).exists() for w in rest if w.startswith("tests/"))
