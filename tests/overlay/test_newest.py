# SPDX-License-Identifier: Apache-2.0
"""A tree that is behind a release is told so."""

import subprocess

import pytest

from tools.overlay import __main__ as commands
from tools.overlay.base import Base

BASE = Base("vllm", "0.33.0", "cpu", sha256="0")


@pytest.mark.parametrize(
    ("newest", "status"),
    [("0.33.0", 0), ("0.32.1", 0), ("0.33.0.post1", 1), ("0.100.0", 1), (None, 1)],
)
def test_command(monkeypatch, capsys, newest, status):
    """None: pip found nothing."""

    def run(*args, **more):
        said = f"vllm ({newest})\nAvailable versions: {newest}, 0.31.0\n"
        return subprocess.CompletedProcess([], 0, said if newest else "", "no index")

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(commands, "pinned_base", lambda device: BASE)
    monkeypatch.setattr(commands, "fetch", lambda base: base.version)
    monkeypatch.setattr(commands, "find_wheel", lambda base: base.version)
    monkeypatch.setattr(commands, "rebase", lambda old, new, **more: f"{old} to {new}")
    assert commands.main(["newest"]) == status
    out, error = capsys.readouterr()
    assert ("releases of vllm:\nno index" in error) == (newest is None)
    assert (f"0.33.0 to {newest}\n" in out) == bool(status and newest)
