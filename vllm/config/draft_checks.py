# SPDX-License-Identifier: Apache-2.0
"""Refuses speculative settings that cannot work, before anything loads.

Each error names the key at fault and says what to change. What the base refuses as
clearly itself is left to it.
"""

from collections.abc import Collection, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.config.draft_families import tapped_layers
from vllm.config.draft_headers import AGAIN, read_config, read_headers
from vllm.config.drafting import MASK_TOKEN_KEYS, METHODS, draft_limit

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.config.speculative import SpeculativeConfig

# Embedding tables are padded to multiples of at most this many rows: vocabularies
# that differ by fewer may be the same one.
VOCAB_PADDING = 1024


def check_keys(given: Any, known: Collection[str]) -> None:
    """Checks a speculative config as the user wrote it.

    Raises:
        ValueError: it is not a mapping, or has a key that is not known.
    """
    if not isinstance(given, Mapping):
        raise ValueError(
            f"speculative_config must be a JSON object, not {given!r}: write for "
            'example {"model": "amd/PARD-Llama-3.2-1B", "num_speculative_tokens": 7}.'
        )
    for key in given:
        name = str(key).replace("-", "_")
        if name not in known:
            near = get_close_matches(name, known, n=1)
            remedy = f'did you mean "{near[0]}"?' if near else "remove it."
            raise ValueError(f'speculative_config has no key "{key}": {remedy}')


def check_settings(spec: "SpeculativeConfig") -> None:
    """Checks the settings and the drafter's folder, before the base reads them.

    Raises:
        ValueError: there is no drafter, or its config.json cannot be one's.
    """
    names_ngram = spec.method is None and spec.model in ("ngram", "[ngram]")
    needs_model = spec.method in (None, *METHODS) and not names_ngram
    if needs_model and spec.model is None:
        raise ValueError(
            'speculative_config has no "model": name the folder or the hub id of a '
            'drafter, or a "method" that needs none, such as "ngram".'
        )
    target = spec.target_model_config
    limit = None if target is None else target.max_model_len
    if limit and spec.max_model_len and spec.max_model_len > limit:
        raise ValueError(
            f"max_model_len of speculative_config ({spec.max_model_len}) must be at "
            f"most the target's ({limit}): lower it, or leave it unset."
        )
    _check_schedule(spec.num_speculative_tokens_per_batch_size)
    if needs_model and _names_a_path(spec.model):
        _check_folder(Path(spec.model))


def _check_schedule(schedule: Any) -> None:
    from vllm.v1.spec_decode.dynamic import utils

    if not isinstance(schedule, list):
        return
    try:
        utils.validate_and_normalize_dynamic_sd_schedule(schedule)
    except ValueError as error:
        raise ValueError(
            f"num_speculative_tokens_per_batch_size {schedule}: {error} Write [first "
            "batch size, last batch size, draft length] for ranges from 1 on, such as "
            "[[1, 8, 4], [9, 64, 2]]."
        ) from None


def _names_a_path(model: str) -> bool:
    """Whether a model can only be a local path, or is one that exists."""
    if "://" in model:
        return False
    is_path = model.startswith(("/", "./", "../")) or model.count("/") > 1
    return is_path or Path(model).exists()


def _check_folder(folder: Path) -> None:
    if folder.suffix == ".gguf":
        return
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise ValueError(
            f'"model" of speculative_config: {folder} {what}: name the folder that '
            "holds the drafter's config.json and weights."
        )
    if (folder / "config.json").is_file():
        _check_config(folder, read_config(folder / "config.json"))
    elif (folder / "adapter_config.json").is_file():
        raise ValueError(
            f'"model" of speculative_config: {folder} is a LoRA adapter, which cannot '
            "draft: merge it into its base model, and name the merged model."
        )
    elif not (folder / "params.json").is_file():
        raise ValueError(
            f'"model" of speculative_config: {folder} has no config.json: name a '
            f"drafter's folder, or {AGAIN}."
        )
    read_headers(folder)


def _check_config(folder: Path, config: Mapping[str, Any]) -> None:
    for key in MASK_TOKEN_KEYS:
        value = config.get(key)
        if value is not None and type(value) is not int:
            raise ValueError(
                f"{key} in {folder}/config.json must be one token id, not {value!r}: "
                "correct it there."
            )
    if config.get("speculators_model_type") is not None:
        _check_speculators(folder, config)
    depth = config.get("num_depths")
    if depth is not None and (type(depth) is not int or depth < 1):
        raise ValueError(
            f"num_depths in {folder}/config.json must be a positive integer, not "
            f"{depth!r}: correct it there, or remove it."
        )


def _check_speculators(folder: Path, config: Mapping[str, Any]) -> None:
    where = f"in {folder}/config.json"
    layer, settings = (
        config.get("transformer_layer_config"),
        config.get("speculators_config") or {},
    )
    for key, section in (
        ("transformer_layer_config", layer),
        ("speculators_config", settings),
    ):
        if not isinstance(section, Mapping):
            raise ValueError(f"{key} {where} must be a JSON object: {AGAIN}.")
    kind = config["speculators_model_type"]
    if kind not in (known := _speculators_types()):
        raise ValueError(
            f"speculators_model_type {where} is {kind!r}, which is not supported: use "
            f"a checkpoint of type {', '.join(known)}."
        )
    is_peagle = kind == "peagle"
    if is_peagle and config.get("mask_token_id") is None:
        raise ValueError(
            f"mask_token_id {where} is missing, which P-EAGLE needs: add the id of the "
            "token that it was trained with."
        )
    methods = settings.get("proposal_methods")
    first = methods[0] if isinstance(methods, list) and methods else {}
    depth = first.get("speculative_tokens") if isinstance(first, Mapping) else first
    if depth is not None and (type(depth) is not int or depth < 1):
        raise ValueError(
            f"speculative_tokens {where} must be a positive integer, not {depth!r}: "
            "correct it there."
        )


def _speculators_types() -> list[str]:
    from vllm.transformers_utils.configs.speculators import algos

    return sorted(algos.SUPPORTED_SPECULATORS_TYPES)


def check_drafter(spec: "SpeculativeConfig") -> None:
    """Checks the drafter's finished config against the target's.

    Raises:
        ValueError: the drafter cannot draft for the target as it is asked to.
    """
    if spec.method not in METHODS or spec.target_model_config is None:
        return
    _check_length(spec)
    _check_attention(spec)
    if spec.method != "draft_model":
        _check_vocabulary(spec)
        _check_tapped_layers(spec)


def _check_length(spec: "SpeculativeConfig") -> None:
    drafts, target = spec.num_speculative_tokens, spec.target_model_config
    if drafts >= target.max_model_len:
        raise ValueError(
            f"num_speculative_tokens ({drafts}) must be below the target's "
            f"max_model_len ({target.max_model_len}): lower it, for example to 7."
        )
    limit = draft_limit(spec, target.max_model_len)
    if drafts >= limit:
        raise ValueError(
            f"num_speculative_tokens ({drafts}) must be below the drafter's context "
            f"({limit}): lower it, or raise max_model_len of speculative_config or "
            "max_position_embeddings of the drafter."
        )


def _check_attention(spec: "SpeculativeConfig") -> None:
    config = spec.draft_model_config.hf_text_config
    heads = getattr(config, "num_attention_heads", None)
    shared = getattr(config, "num_key_value_heads", None) or 1
    # Some models name a number for each layer.
    if isinstance(heads, int) and isinstance(shared, int) and heads % shared:
        raise ValueError(
            f"num_attention_heads of {spec.model} ({heads}) must be a multiple of "
            f"num_key_value_heads ({shared}): correct them in config.json."
        )


def _check_vocabulary(spec: "SpeculativeConfig") -> None:
    ours = spec.draft_model_config.get_vocab_size()
    theirs = spec.target_model_config.get_vocab_size()
    if abs(ours - theirs) > VOCAB_PADDING:
        raise ValueError(
            f"vocab_size of {spec.model} ({ours}) must be the target's ({theirs}): "
            "use a head that was trained for this target."
        )
    config = spec.draft_model_config.hf_config
    reduced = getattr(config, "draft_vocab_size", None)
    if reduced is not None and not 0 < reduced <= ours:
        raise ValueError(
            f"draft_vocab_size of {spec.model} ({reduced}) must be from 1 to its "
            f"vocab_size ({ours}): correct it in config.json."
        )


def _check_tapped_layers(spec: "SpeculativeConfig") -> None:
    config, target = spec.draft_model_config.hf_config, spec.target_model_config
    width = getattr(config, "target_hidden_size", None)
    if width is not None and width != target.get_hidden_size():
        raise ValueError(
            f"target_hidden_size of {spec.model} ({width}) must be the target's "
            f"hidden size ({target.get_hidden_size()}): use a head that was trained "
            "for this target."
        )
    ids, depth = tapped_layers(config) or (), target.get_total_num_hidden_layers()
    if len(set(ids)) < len(ids) or not all(0 <= i <= depth for i in ids):
        raise ValueError(
            f"eagle_aux_hidden_state_layer_ids of {spec.model} {list(ids)} must be "
            f"different layers from 0 to {depth} of the target: use a head that was "
            "trained for this target, or correct them in config.json."
        )


def check_parallelism(vllm_config: "VllmConfig") -> None:
    """Checks what only the whole config can tell.

    Raises:
        ValueError: a drafter that would be cut into pipeline stages.
    """
    spec, parallel = vllm_config.speculative_config, vllm_config.parallel_config
    stages = parallel.pipeline_parallel_size
    if stages > 1 and (spec.method == "draft_model" or spec.parallel_drafting):
        raise ValueError(
            f"pipeline_parallel_size ({stages}) does not support draft models and "
            "parallel drafting: use tensor_parallel_size, or an EAGLE-3 head with "
            "parallel_drafting=false."
        )
