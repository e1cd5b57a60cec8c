# SPDX-License-Identifier: Apache-2.0
"""The commands that CONTRIBUTING.md tells of."""

import re
import shlex

import pytest

from tools.ci.__main__ import main
from tools.ci.local import find
from tools.ci.steps import ROOT, load

TEXT = (ROOT / "CONTRIBUTING.md").read_text()
COMMANDS = re.findall(r"^python -m tools\.ci (.*)$", TEXT, re.MULTILINE)


@pytest.mark.parametrize("command", COMMANDS)
def test_documented_commands(command, capsys):
    name, *rest = shlex.split(command)
    if name == "run":
        assert find(load(), *rest)[0].in_make_test  # `make test` does run it
        return
    assert main([name, *rest]) == 0
    out = capsys.readouterr().out
    said = {"list": "Interpreted Kernels", "generate": "key: speculator"}
    assert said.get(name, "steps are in order") in out


def test_all_kinds_are_documented():
    assert {command.split()[0] for command in COMMANDS} >= {"list", "run", "generate"}


@pytest.mark.parametrize("key", ["source_file_dependencies", "optional", "num_devices"])
def test_keys_are_documented(key):
    assert f"`{key}`" in TEXT
