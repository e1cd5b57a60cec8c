# SPDX-License-Identifier: Apache-2.0
"""Whether a drafter whose name may be that of a missing folder is on the hub."""

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
    if not needs_model(spec) or names_a_path(spec.model) or not _may_be_a_path(spec):
        return
    folder = Path(spec.model)
    if not _is_on_hub(spec):
        others = os.listdir(folder.parent) if folder.parent.is_dir() else []
        near = get_close_matches(folder.name, others, n=1)
        proposed = f', such as "{folder.parent / near[0]}"' if near else ""
        raise ValueError(
            f'"model" of speculative_config: {folder} does not exist, nor was it found '
            "on the hub: name the folder that holds the drafter's config.json and "
            f"weights{proposed}."
        )


def _may_be_a_path(spec: "SpeculativeConfig") -> bool:
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    cached = repo_folder_name(repo_id=spec.model, repo_type="model")
    target = getattr(spec.target_model_config, "model", None)
    is_beside = "/" in spec.model and Path(spec.model).parent.is_dir()
    return (
        (is_beside or (target is not None and Path(target).is_dir()))
        and ":" not in spec.model  # a URL, or a file of a repository
        and not Path(constants.HF_HUB_CACHE, cached).is_dir()
        and not envs.VLLM_USE_MODELSCOPE
    )


def _is_on_hub(spec: "SpeculativeConfig") -> bool:
    from huggingface_hub import file_download, hf_hub_url
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        RepositoryNotFoundError,
    )

    url = hf_hub_url(spec.model, "config.json", revision=spec.revision)
    token = getattr(spec.target_model_config, "hf_token", None)
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
