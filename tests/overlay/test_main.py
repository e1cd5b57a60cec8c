# SPDX-License-Identifier: Apache-2.0
"""The commands: what they print and their exit codes."""

import pytest

from tests.overlay.fakes import write_wheel
from tools.overlay import rebase as rebase_module
from tools.overlay.__main__ import main
from tools.overlay.rebase import Report


def test_check_lists_problems(tmp_path, capsys):
    assert main(["check", "--wheel", str(write_wheel(tmp_path, {}))]) == 1
    assert "the base no longer has this file" in capsys.readouterr().out


def test_overlay_error_is_one_line(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("VLLM_BASE_WHEEL", str(tmp_path / "nowhere.whl"))
    assert main(["check"]) == 1
    assert capsys.readouterr().err.startswith("error: VLLM_BASE_WHEEL: there is no")


@pytest.mark.parametrize(
    ("clean", "strict", "code"),
    [(False, [], 0), (False, ["--strict"], 1), (True, [], 0)],
)
def test_rebase(monkeypatch, tmp_path, clean, strict, code):
    monkeypatch.setattr(rebase_module, "rebase", lambda *args: Report(f"{args}", clean))
    output = tmp_path / "report.md"
    command = ["rebase", "--version", "9.9.9", "--device", "cuda", *strict]
    assert main([*command, "--output", str(output)]) == code
    assert output.read_text() == "('9.9.9', 'cuda', None)"
