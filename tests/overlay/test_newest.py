# SPDX-License-Identifier: Apache-2.0
"""A tree that is a day behind a release is told so."""

import subprocess
from datetime import UTC, datetime, timedelta
from zipfile import ZipFile, ZipInfo

import pytest

from tools.overlay import __main__ as commands
from tools.overlay.base import Base, OverlayError
from tools.overlay.newest import is_newer, lateness, newest_version

BUILT = datetime(2026, 11, 1, 9, 43, tzinfo=UTC)


@pytest.fixture
def wheel(tmp_path):
    path = tmp_path / "vllm-2.0.0.whl"
    with ZipFile(path, "w") as archive:
        archive.writestr(ZipInfo("old.py", (2020, 2, 2, 0, 0, 0)), "")
        archive.writestr(ZipInfo("new.py", BUILT.timetuple()[:6]), "")
    return path


def test_order_of_releases():
    assert is_newer("0.33.0.post1", "0.33.0") and is_newer("0.100.0", "0.33.0")
    assert not is_newer("0.33.0", "0.33.0") and not is_newer("0.32.1", "0.33.0")


def test_a_day_to_move(wheel):
    def late(version: str, hours: int) -> str | None:
        return lateness(version, wheel, "1.0.0", BUILT + timedelta(hours=hours))

    assert late("2.0.0", 23) is None and late("1.0.0", 999) is None
    message = "vLLM 2.0.0 was built on 2026-11-01, 1 days ago"
    assert late("2.0.0", 25).startswith(message)


def test_newest_version(monkeypatch):
    said = ["", "vllm (0.34.0)\nAvailable versions: 0.34.0, 0.33.0\n"]

    def run(*args, **more):
        return subprocess.CompletedProcess([], 0, said.pop(), "no index")

    monkeypatch.setattr(subprocess, "run", run)
    assert newest_version("vllm") == "0.34.0"
    with pytest.raises(OverlayError, match=r"(?s)releases of vllm:.*no index"):
        newest_version("vllm")


@pytest.mark.parametrize(("version", "status"), [("1.0.0", 0), ("2.0.0", 1)])
def test_command(monkeypatch, wheel, capsys, version, status):
    base = Base("vllm", "1.0.0", "cpu", sha256="0")
    for name, value in {
        "pinned_base": base, "newest_version": version, "fetch": wheel,
        "find_wheel": wheel, "rebase": "the report",
    }.items():  # fmt: skip
        monkeypatch.setattr(commands, name, lambda *a, value=value, **k: value)
    assert commands.main(["newest"]) == status
    assert ("the report" in capsys.readouterr().out) == bool(status)
