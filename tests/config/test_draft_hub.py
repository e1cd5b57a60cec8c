# SPDX-License-Identifier: Apache-2.0
"""A mistyped folder is refused at once, not after minutes of questions to the hub."""

import shutil

import pytest
from huggingface_hub import file_download
from huggingface_hub.errors import (
    GatedRepoError,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
)

from vllm.config.drafter.hub import check_hub

from .specs import cached, unresolved

NO_ANSWER = OSError()
NOWHERE = RepositoryNotFoundError.__new__(RepositoryNotFoundError)
GATED = GatedRepoError.__new__(GatedRepoError)
NO_CONFIG = RemoteEntryNotFoundError.__new__(RemoteEntryNotFoundError)


@pytest.mark.parametrize("name", ["models/padr", "someone/padr"])
@pytest.mark.parametrize("answer", [None, NO_CONFIG, GATED, NOWHERE, NO_ANSWER])
def test_the_hub_is_asked_once_for_what_reads_like_a_folder(
    models, tmp_path, monkeypatch, name: str, answer: Exception | None
):
    """Where a folder is beside it; other names may be nothing but ids."""

    def ask(*args, **options):
        asked.append(args)
        if answer is not None:
            raise answer

    asked, is_refused = [], answer in (NOWHERE, NO_ANSWER)
    (tmp_path / "models" / "pard").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(file_download, "get_hf_file_metadata", ask)
    if name == "someone/padr" or not is_refused:
        check_hub(unresolved(name))
    else:
        with pytest.raises(ValueError, match=r'nor was it .*"models/pard"\.'):
            check_hub(unresolved(name))
    assert len(asked) == (name == "models/padr")


def test_the_hub_is_not_asked_for_what_is_cached(models, tmp_path, monkeypatch):
    shutil.copytree(models / "peagle", folder := tmp_path / "someone")
    spec = unresolved(cached(folder, "someone/head", monkeypatch))
    monkeypatch.chdir(tmp_path)
    monkeypatch.delattr(file_download, "get_hf_file_metadata")
    check_hub(spec)
