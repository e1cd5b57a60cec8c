# SPDX-License-Identifier: Apache-2.0
"""A drafter's files are read once, as often as they are asked for."""

import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from vllm.config import draft_headers
from vllm.config.draft_headers import read_config
from vllm.engine.arg_utils import EngineArgs


@pytest.fixture
def parsed(monkeypatch) -> list[dict]:
    """All JSON that `draft_headers` parses."""
    found = []

    def loads(text: str) -> dict:
        found.append(json.loads(text))
        return found[-1]

    monkeypatch.setattr(draft_headers, "json", SimpleNamespace(loads=loads))
    return found


@pytest.mark.parametrize("name", ["draft", "peagle"])
def test_configuring_reads_each_file_once(name: str, models, tmp_path, parsed):
    shutil.copytree(models / name, folder := tmp_path / "drafter")
    spec = {"model": str(folder), "num_speculative_tokens": 2}
    EngineArgs(
        model=str(models / "target"), speculative_config=spec
    ).create_engine_config()
    # config.json, and the header of the one file of weights.
    assert ["architectures" in found for found in parsed] == [True, False]


def write(file: Path, text: str, modified: int) -> None:
    file.write_text(text)
    os.utime(file, ns=(modified, modified))


def test_a_file_that_changed_is_read_again(tmp_path, parsed):
    file = tmp_path / "config.json"
    write(file, "{}", 1)
    assert [read_config(file), read_config(file)] == [{}, {}]
    assert len(parsed) == 1
    write(file, '{"a": 1}', 1)  # another size
    assert read_config(file) == {"a": 1}
    write(file, '{"a": 2}', 2)  # another time
    assert read_config(file) == {"a": 2}


def test_errors_are_not_kept(tmp_path):
    file = tmp_path / "config.json"
    write(file, "[]", 1)
    with pytest.raises(ValueError, match="must hold a JSON object"):
        read_config(file)
    write(file, "{}", 1)
    assert read_config(file) == {}
