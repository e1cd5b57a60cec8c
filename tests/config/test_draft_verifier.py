# SPDX-License-Identifier: Apache-2.0
"""A speculators head served alone names its target; nothing else differs."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from vllm.engine.arg_utils import EngineArgs

from .bad_row import GONE, config
from .specs import cached, engine_config


@pytest.fixture
def target(models: Path, tmp_path: Path, monkeypatch) -> str:
    """The bundled target, as a repository of the hub in an offline cache."""
    shutil.copytree(models / "target", folder := tmp_path / "target")
    return cached(folder, "someone/target", monkeypatch)


@pytest.fixture
def head(models: Path, tmp_path: Path, request) -> Path:
    """A copy of a bundled head that names the target."""
    shutil.copytree(models / request.param, folder := tmp_path / "head")
    config(speculators_config__verifier__name_or_path="someone/target")(folder)
    return folder


def settings(spec: Any) -> tuple:
    lengths = spec.num_speculative_tokens_per_batch_size
    return spec.drafter, lengths, spec.num_speculative_tokens, spec.is_auto_by_default


@pytest.mark.parametrize("head", ["eagle3", "peagle"], indirect=True)
@pytest.mark.parametrize(
    "spec",
    [
        None,
        {"num_speculative_tokens": 3},
        {"draft_tree": 31},
        {"num_speculative_tokens_per_batch_size": "auto"},
        {"num-speculative-tokens-per-batch-size": [[1, 8, 2]]},
        {"parallel_drafting": False},
        {"hf_overrides": {"num_depths": 2}},
    ],
)
def test_head_alone_is_configured_like_a_named_one(spec, head: Path, target: str):
    alone = engine_config(head, spec)
    named = engine_config(target, {"model": str(head), **(spec or {})})
    assert alone.model_config.model == alone.model_config.tokenizer == target
    assert settings(alone.speculative_config) == settings(named.speculative_config)
    is_auto = not spec or "hf_overrides" in spec or "parallel_drafting" in spec
    assert alone.speculative_config.is_auto_by_default == is_auto


@pytest.mark.parametrize("head", ["eagle3"], indirect=True)
def test_length_of_head_alone_can_be_set_by_its_own_argument(head: Path, target: str):
    """Regression: it was refused, as if the file's length were the user's."""
    arguments = EngineArgs(model=str(head), spec_tokens=3, dtype="float32")
    spec = arguments.create_engine_config().speculative_config
    assert spec.num_speculative_tokens == 3


NAME = "speculators_config__verifier__name_or_path"
BAD_NAMES = ("", None, 7, GONE, "/gone/target", "gone/target", ".")


@pytest.mark.parametrize("head", ["eagle3"], indirect=True)
@pytest.mark.parametrize(
    "broken",
    [
        *({NAME: name} for name in BAD_NAMES),
        *({"speculators_config__verifier": value} for value in (None, GONE)),
    ],
)
def test_target_of_head_alone_must_be_on_the_hub(broken, head: Path, monkeypatch):
    """The last name exists, but no file chooses a folder of this machine."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    config(**broken)(head)
    said = rf"verifier.name_or_path of .* in {head}/config.json is .*: name the target"
    with pytest.raises(ValueError, match=said):
        engine_config(head, None)
