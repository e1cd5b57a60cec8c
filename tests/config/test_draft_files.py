# SPDX-License-Identifier: Apache-2.0
"""A drafter's files are read without side effects on forked engines."""

import shutil
import subprocess
import sys
from pathlib import Path

import torch

from .bad_row import config, tensors

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
