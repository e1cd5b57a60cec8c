# SPDX-License-Identifier: Apache-2.0
"""A mistyped folder is refused at once, not after minutes of requests to the hub."""

import shutil
from types import SimpleNamespace

import pytest
from huggingface_hub import file_download
from huggingface_hub.errors import (
    GatedRepoError,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
)

from vllm.config.drafter.files import check_folder, check_model

from .specs import cached, unresolved

NO_ANSWER = OSError()
NOWHERE = RepositoryNotFoundError.__new__(RepositoryNotFoundError)
GATED = GatedRepoError.__new__(GatedRepoError)
NO_CONFIG = RemoteEntryNotFoundError.__new__(RemoteEntryNotFoundError)


NOT_FOUND = r"not exist, nor was it found on the hub: .* weights"


@pytest.mark.parametrize(
    ("name", "has_folder_target", "error"),
    [
        ("models/padr", False, NOT_FOUND + r', such as "models/pard"\.'),
        ("someone/padr", False, None),
        ("modles/pard", True, NOT_FOUND + r"\."),
        ("padr", True, NOT_FOUND + r"\."),
    ],
)
@pytest.mark.parametrize("answer", [None, NO_CONFIG, GATED, NOWHERE, NO_ANSWER])
def test_hub_is_asked_once_if_name_may_be_a_folder(
    models, tmp_path, monkeypatch, name, has_folder_target, error, answer
):
    """If its parent folder exists or the target is a folder; others can only be ids."""

    def ask(*args, **options):
        asked.append(args)
        if answer is not None:
            raise answer

    asked, target = [], models / "target" if has_folder_target else "someone/target"
    spec = unresolved(name, target_model_config=SimpleNamespace(model=str(target)))
    (tmp_path / "models" / "pard").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(file_download, "get_hf_file_metadata", ask)
    if error is None or answer not in (NOWHERE, NO_ANSWER):
        check_model(spec)
    else:
        with pytest.raises(ValueError, match=error):
            check_model(spec)
    assert len(asked) == (error is not None)


def test_subfolders_of_a_folder_are_named(tmp_path):
    for name in ("full", "compressed", "other"):
        (tmp_path / name).mkdir()
        if name != "other":
            (tmp_path / name / "config.json").write_text("{}")
    said = f"such as {tmp_path}/compressed or {tmp_path}/full, or download"
    with pytest.raises(ValueError, match=said):
        check_folder(unresolved(tmp_path))


def test_hub_is_not_asked_for_cached_models(models, tmp_path, monkeypatch):
    shutil.copytree(models / "peagle", folder := tmp_path / "someone")
    spec = unresolved(cached(folder, "someone/head", monkeypatch))
    monkeypatch.chdir(tmp_path)
    monkeypatch.delattr(file_download, "get_hf_file_metadata")
    check_model(spec)
