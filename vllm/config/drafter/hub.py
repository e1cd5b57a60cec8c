# SPDX-License-Identifier: Apache-2.0
"""Whether a model whose name may be that of a missing folder is on the hub."""

import os
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING

import vllm.envs as envs

from .checkpoint import names_a_path, needs_model

if TYPE_CHECKING:
    from vllm.config.speculative import SpeculativeConfig


def check_hub(spec: "SpeculativeConfig") -> None:
    """Checks that a drafter is on the hub if its name may be that of a missing folder.

    It may be if its parent folder exists, or if the target is a local folder. The hub
    is asked once; if it did not answer, vLLM and transformers would retry for minutes.

    Raises:
        ValueError: it is not on the hub, or the hub does not answer.
    """
    if not needs_model(spec) or names_a_path(spec.model):
        return
    target = spec.target_model_config
    folder = getattr(target, "model", None)
    may_be_path = _may_be_a_path(
        spec.model, folder is not None and os.path.isdir(folder)
    )
    token = getattr(target, "hf_token", None)
    if may_be_path and not _is_on_hub(spec.model, spec.revision, token):
        raise ValueError(
            f'"model" of speculative_config: {spec.model} does not exist, nor was it '
            "found on the hub: name the folder that holds the drafter's config.json "
            f"and weights{_proposed(spec.model)}."
        )


def check_target(model: str, revision: str | None, token: str | bool | None) -> None:
    """Checks that a target is on the hub if its name can be that of a missing folder.

    Raises:
        ValueError: it is not on the hub, or the hub does not answer.
    """
    if names_a_path(model):
        is_found = os.path.exists(model)
    else:
        is_found = not _may_be_a_path(model) or _is_on_hub(model, revision, token)
    if not is_found:
        raise ValueError(
            f"--model: {model} does not exist, nor was it found on the hub: name the "
            f"folder that holds its config.json and weights{_proposed(model)}."
        )


def _proposed(model: str) -> str:
    folder = Path(model)
    others = os.listdir(folder.parent) if folder.parent.is_dir() else []
    near = get_close_matches(folder.name, others, n=1)
    return f', such as "{folder.parent / near[0]}"' if near else ""


def _may_be_a_path(model: str, is_beside_local: bool = False) -> bool:
    """Whether a name may be a path, as it is if the model beside it is a folder."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    cached = repo_folder_name(repo_id=model, repo_type="model")
    return (
        (is_beside_local or ("/" in model and Path(model).parent.is_dir()))
        and ":" not in model  # a URL, or a file of a repository
        and not Path(constants.HF_HUB_CACHE, cached).is_dir()
        and not envs.VLLM_USE_MODELSCOPE
    )


def _is_on_hub(model: str, revision: str | None, token: str | bool | None) -> bool:
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
