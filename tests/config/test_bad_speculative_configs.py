# SPDX-License-Identifier: Apache-2.0
"""Configs that cannot work are refused with one clear error, before weights load."""

import re
import shutil
from pathlib import Path

import pytest
import torch
import yaml

from .bad_checkpoints import FILES
from .bad_row import GONE, Row, Tensors, edited_weights, rotated, row_of, tensors
from .specs import cached, engine_config

CONFIGS = yaml.safe_load(
    Path(__file__).with_name("speculative_configs.yaml").read_text()
)
DOCS = Path(__file__).resolve().parents[2] / "docs" / "troubleshooting.md"
# Errors that the page lists: the first cell of each table row. Errors of loading come
# last; `tests/model_executor` and `tests/v1/worker` test them.
SECTIONS = DOCS.read_text().partition("\n## Settings\n")[2]
CONFIGURED = SECTIONS.partition("## While the drafter loads")[0]
LISTED = re.findall(r"^\| `(.*?)` \| .+ \|$", CONFIGURED, re.MULTILINE)


ROWS = [*map(row_of, CONFIGS["refused"]), *FILES]


@pytest.fixture
def configure(models, tmp_path_factory, monkeypatch):
    """Creates the engine config of a row, as `vllm serve` does; loads no weights."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    # Not a folder named after the test: vLLM derives methods from words in paths.
    folder = tmp_path_factory.mktemp("checkpoint") / "drafter"

    def run(row: Row):
        shutil.copytree(models / row.drafter, folder)
        for apply in row.breaks:
            apply(folder)
        for name, value in row.env.items():
            monkeypatch.setenv(name, value)
        spec = row.speculative_config(folder)
        return engine_config(models / "target", spec, **row.engine)

    return run


def pattern(error: str) -> str:
    return ".*?".join(map(re.escape, error.split("…")))


def entry(says: str) -> str:
    """The error of the page that has these words, or of whose kind they are; of several
    the longest."""
    found = [e for e in LISTED if says in e or re.search(pattern(e), says)]
    return max(found, key=len)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.says)
def test_bad_config_is_refused_as_documented(configure, row: Row):
    """By one error, without another as its cause."""
    with pytest.raises(ValueError) as caught:
        configure(row)
    error = caught.value
    assert error.__cause__ is None
    assert error.__suppress_context__ or error.__context__ is None
    said = re.sub(r"\s+", " ", str(error))
    for words in (row.says, entry(row.says)):
        assert re.search(pattern(words), said), said


def test_each_documented_error_has_a_row():
    # Tested elsewhere: what only a CPU refuses in `test_drafter.py`; requests to the
    # hub in `test_draft_hub.py`; heads served alone in `test_draft_verifier.py`.
    elsewhere = {entry("nor was it found on the hub"), entry("no model on the hub")}
    elsewhere |= {entry("stages on a CPU")}
    assert {entry(row.says) for row in ROWS} | elsewhere == set(LISTED)


def test_hub_cache_is_checked(models, tmp_path, monkeypatch):
    shutil.copytree(models / "peagle", folder := tmp_path / "drafter")
    tensors({"mask_hidden": GONE})(folder)
    spec = {"model": cached(folder, "someone/head", monkeypatch)}
    with pytest.raises(ValueError, match="someone/head has no tensor mask_hidden"):
        engine_config(models / "target", spec)


def fused(weights: Tensors) -> Tensors:
    """Merges QKV and gate/up projections into one tensor each, as vLLM does."""
    for whole, parts in {"qkv": ("q", "k", "v"), "gate_up": ("gate", "up")}.items():
        for name in [name for name in weights if f"{parts[0]}_proj" in name]:
            names = [name.replace(f"{parts[0]}_proj", f"{part}_proj") for part in parts]
            weights[name.replace(f"{parts[0]}_proj", f"{whole}_proj")] = torch.cat(
                [weights.pop(part) for part in names]
            )
    return weights


GOOD = [
    *map(row_of, CONFIGS["taken"]),
    Row("several tensors in one", edited_weights(fused), drafter="draft"),
    Row(
        "d2t names a token twice",
        tensors({"d2t": torch.tensor([1] + [0] * 1535)}),
        drafter="eagle3",
    ),
    Row("some other tokens", rotated(300, 302), drafter="draft"),
]


@pytest.mark.parametrize("row", GOOD, ids=lambda row: row.says)
def test_good_config_is_not_refused(configure, row: Row):
    assert configure(row).speculative_config.num_speculative_tokens > 0
