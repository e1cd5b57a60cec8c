# SPDX-License-Identifier: Apache-2.0
"""`vllm serve` with a speculators head in the place of a model: it names its target."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from .hub import is_missing


def serve_head(
    head: str, config: Mapping[str, Any], spec: Any, token: Any
) -> tuple[str, str, Any]:
    """The target that a head names, its tokenizer, and the speculative config.

    That is the user's with the head as `model`, so that nothing in the head's file
    counts as set by the user.

    Args:
        head: folder or hub id of the head.
        config: its config.json.
        spec: the user's speculative config; None if there is none.
        token: for the hub.

    Raises:
        ValueError: the head does not name a model on the hub. As in vLLM, no file
            chooses a folder of this machine.
    """
    settings = config["speculators_config"]
    verifier = settings.get("verifier") if isinstance(settings, Mapping) else None
    name = verifier.get("name_or_path") if isinstance(verifier, Mapping) else None
    if not _is_on_hub(name, token, Path(head).is_dir()):
        raise ValueError(
            f"verifier.name_or_path of speculators_config in {head}/config.json is "
            f"{name!r}, which is no model on the hub: name the target, as in vllm "
            f'serve TARGET --speculative-config \'{{"model": "{head}"}}\'.'
        )
    if spec is None or isinstance(spec, Mapping):
        spec = {**(spec or {}), "model": head}
    return name, name, spec


def _is_on_hub(name: Any, token: Any, is_local: bool) -> bool:
    try:
        validate_repo_id(name or "")
    except HFValidationError:
        return False
    path = Path(name)
    is_path = path.exists() or path.is_symlink()
    return not is_path and not is_missing(name, None, token, is_local)
