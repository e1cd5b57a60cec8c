# SPDX-License-Identifier: Apache-2.0
"""A drafter's files are read once, without side effects on forked engines."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from vllm.config.drafter import files
from vllm.config.drafter.files import read_config

from .bad_row import config, tensors
from .specs import engine_config

# Large enough that PyTorch would run loops over it in several threads.
NUM_TOKENS, WIDTH = 40_000, 256
CONFIGURE_AND_FORK = """
import os, signal, sys
import torch
from vllm.engine.arg_utils import EngineArgs

target, drafter = sys.argv[1:]
spec = {"model": drafter, "num_speculative_tokens": 3}
EngineArgs(model=target, speculative_config=spec).create_engine_config()
child = os.fork()
if child == 0:
    signal.alarm(20)
    torch.ones(1 << 22).sum()
    os._exit(0)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0)
"""


@pytest.fixture
def parsed(monkeypatch) -> list[dict]:
    """Collects all JSON that `files` parses."""
    found = []

    def loads(text: str) -> dict:
        found.append(json.loads(text))
        return found[-1]

    monkeypatch.setattr(files, "json", SimpleNamespace(loads=loads))
    return found


@pytest.mark.parametrize("name", ["draft", "peagle"])
def test_configuring_reads_each_file_once(name: str, models, tmp_path, parsed):
    shutil.copytree(models / name, folder := tmp_path / "drafter")
    spec = {"model": str(folder), "num_speculative_tokens": 2}
    engine_config(models / "target", spec)
    # config.json, and the header of the single weights file.
    assert ["architectures" in found for found in parsed] == [True, False]


def write(file: Path, text: str, modified: int) -> None:
    file.write_text(text)
    os.utime(file, ns=(modified, modified))


def test_changed_file_is_read_again(tmp_path, parsed):
    file = tmp_path / "config.json"
    write(file, "[]", 1)
    with pytest.raises(ValueError, match="must hold a JSON object"):
        read_config(file)
    write(file, "{}", 1)  # errors are not cached
    assert [read_config(file), read_config(file)] == [{}, {}]
    assert parsed == [[], {}]
    write(file, '{"a": 1}', 1)  # another size
    assert read_config(file) == {"a": 1}
    write(file, '{"a": 2}', 2)  # another time
    assert read_config(file) == {"a": 2}


def test_forked_engine_does_not_hang(models: Path, engine_env, tmp_path: Path):
    """Engines are forked from the process that checks drafters.

    If PyTorch had run a parallel loop there, an engine would hang in its first one.
    """
    target, drafter = tmp_path / "target", tmp_path / "eagle3"
    shutil.copytree(models / "target", target)
    shutil.copytree(models / "eagle3", drafter)
    # The target's vocabulary is twice as large as the head's.
    config(vocab_size=2 * NUM_TOKENS)(target)
    config(
        transformer_layer_config__vocab_size=2 * NUM_TOKENS, draft_vocab_size=NUM_TOKENS
    )(drafter)
    tensors(
        {
            "d2t": torch.zeros(NUM_TOKENS, dtype=torch.int64),
            "lm_head.weight": (NUM_TOKENS, WIDTH),
        }
    )(drafter)
    command = [sys.executable, "-c", CONFIGURE_AND_FORK, str(target), str(drafter)]
    # With one thread there is no parallel loop.
    env = engine_env | {"OMP_NUM_THREADS": "2"}
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
