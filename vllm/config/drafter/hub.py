# SPDX-License-Identifier: Apache-2.0
"""What the hub has: a model whose name may be that of a missing folder; a config."""

import os
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import HfApi

import vllm.envs as envs

from .checkpoint import names_a_path, needs_model

if TYPE_CHECKING:
    from vllm.config.speculative import SpeculativeConfig


def check_hub(spec: "SpeculativeConfig") -> None:
    """`check_exists` of a drafter."""
    if needs_model(spec) and not names_a_path(spec.model):
        target = spec.target_model_config
        is_local = os.path.isdir(getattr(target, "model", None) or "")
        known = spec.revision, getattr(target, "hf_token", None)
        check_exists('"model" of speculative_config', spec.model, *known, is_local)


def check_root(spec: "SpeculativeConfig") -> None:
    """Checks that a drafter's repository on the hub has a config, in its root.

    To be called if none could be read; vLLM reports other reasons.

    Raises:
        ValueError: it has some in subfolders only, which vLLM does not load.
    """
    if names_a_path(spec.model) or envs.VLLM_USE_MODELSCOPE:
        return
    try:
        files = HfApi().list_repo_files(spec.model, revision=spec.revision)
    except Exception:  # no answer, or no repository
        return
    folders = sorted(
        file.rpartition("/")[0] for file in files if "/config.json" in file
    )
    if folders and not {"config.json", "params.json"} & set(files):
        raise ValueError(
            f'"model" of speculative_config: {spec.model} has its config.json only in '
            f"{', '.join(folders)}: download it, and name one of these folders."
        )


def check_exists(
    what: str, model: str, revision: str | None, token: Any, is_local: bool = False
) -> None:
    """Checks that a model is on the hub if its name may be that of a missing folder.

    It may be if its parent folder exists, or `is_local`: the model beside it is local.
    The hub is asked once; if it did not answer, vLLM and transformers would retry for
    minutes.

    Raises:
        ValueError: it is not on the hub, or the hub does not answer.
    """
    if is_missing(model, revision, token, is_local):
        folder = Path(model)
        others = os.listdir(folder.parent) if folder.parent.is_dir() else []
        near = get_close_matches(folder.name, others, n=1)
        proposed = f', such as "{folder.parent / near[0]}"' if near else ""
        raise ValueError(
            f"{what}: {model} does not exist, nor was it found on the hub: name the "
            f"folder that holds config.json and weights{proposed}."
        )


def is_missing(model: str, revision: str | None, token: Any, is_local: bool) -> bool:
    """Whether a name may be that of a missing folder, and is not on the hub either.

    Args:
        is_local: as for `check_exists`.
    """
    if Path(model).exists():
        return False
    if names_a_path(model):
        return True
    return _may_be_a_path(model, is_local) and not _is_on_hub(model, revision, token)


def _may_be_a_path(model: str, is_local: bool) -> bool:
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    cached = repo_folder_name(repo_id=model, repo_type="model")
    return (
        (is_local or ("/" in model and Path(model).parent.is_dir()))
        and ":" not in model  # a URL, or a file of a repository
        and not Path(constants.HF_HUB_CACHE, cached).is_dir()
        and not envs.VLLM_USE_MODELSCOPE
    )


def _is_on_hub(model: str, revision: str | None, token: Any) -> bool:
    from huggingface_hub import file_download, hf_hub_url
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        RepositoryNotFoundError,
    )

    url = hf_hub_url(model, "config.json", revision=revision)
    try:
        file_download.get_hf_file_metadata(url, token=token)
    except GatedRepoError:  # a subclass of RepositoryNotFoundError
        return True
    except HfHubHTTPError as error:
        # With any other status the repository exists, and vLLM may be able to read it.
        return not isinstance(error, RepositoryNotFoundError)
    except Exception:  # no answer; its type depends on the HTTP library
        return False
    return True
