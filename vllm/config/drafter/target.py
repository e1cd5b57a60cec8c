# SPDX-License-Identifier: Apache-2.0
"""Checks a drafter beside its target: tokens, context, layers, and what it is fed.

Vocabularies may be padded differently: Qwen2.5-0.5B has 151936 rows and Qwen2.5-7B
152064, for the same 151665 tokens. Heads have no tokenizer, and may draft only some of
the target's tokens. With `use_heterogeneous_vocab` a draft model has other tokens, and
drafts only those that the target has too.

PARD-2 is a language model that drafts like PARD. Its file `warp_model.bin` holds a
projection of some of the target's hidden states, which are added to the embeddings.
Without them it can draft, too, but less well.
"""

import re
from collections.abc import Iterator, Mapping
from filecmp import cmp
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any

import torch

from vllm.logger import init_logger
from vllm.v1.spec_decode.vocab_mapping import VocabMapping

from .drafter import BLOCK_METHODS, TargetFeatures
from .families import (
    AGAIN,
    TAPPED_LAYERS,
    check_finite,
    check_integers,
    get_mask_token_id,
    takes_aux_hidden_states,
)
from .files import find_file, parse_json, tensor_names

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from vllm.config import VllmConfig
    from vllm.config.speculative import SpeculativeConfig

logger = init_logger(__name__)

Tokens = Mapping[str, int]
TOKENIZER = "tokenizer.json"
# Embedding tables are padded to multiples of at most this many rows: a vocabulary that
# is smaller by less may be the same one.
VOCAB_PADDING = 1024
# Models of one family may name special tokens differently; other families share few.
MAX_DIFFERENT = 0.5
# As a share of the smaller vocabulary. With fewer tokens in common hardly any text can
# be drafted; published families share half or more.
LEAST_COMMON = 0.01
# Config keys that give the ids of tokens of images, audio and video.
MEDIA = re.compile(
    r"(image|video|audio|media|vision|[be]o[ia])_(\w+_)?token_(id|index)$"
)
# By method, values of config keys that vLLM's speculators do not look at.
UNKNOWN_BLOCKS = {
    "dflash": {"projector_type": ("domino", "dspark"), "sample_from_anchor": (True,)},
    "dspark": {"projector_type": ("domino",), "markov_head_type": ("gated", "rnn")},
}
ONE_LAYER = "EAGLE-3, SafeAILab"  # a family whose heads have a single layer
WARP = "warp_model.bin"
WEIGHT, BIAS = "target_proj.weight", "target_proj.bias"
# Names of config keys in some other checkpoints.
OLD_NAMES = {
    "pard2_scale": ("feat_scale", "pard_scale"),
    "pard2_target_dim": ("pard_target_dim",),
    "pard2_target_layers": ("target_layers",),
    "pard2_proj_bias": ("proj_bias",),
    "pard2_ml": ("ml",),
}
MANY_LAYERS = [-1, -8, -16, -24]


# Vocabularies.


def match_vocabularies(spec: "SpeculativeConfig") -> int | None:
    """Gives a drafter the target's vocabulary size; refuses one with other tokens.

    Sets `vocab_size` of the draft's config, and `draft_vocab_size` of a head that
    drafts all tokens; loading pads or cuts the checkpoint's rows to it.

    Returns:
        The checkpoint's size if it was changed; else None.
    """
    target, draft = spec.target_model_config, spec.draft_model_config
    target_size, draft_size = target.get_vocab_size(), draft.get_vocab_size()
    if spec.use_heterogeneous_vocab:
        return None
    is_head = spec.method != "draft_model"
    if is_head:
        _check_head(spec, target_size, draft_size)
    else:
        check_tokens(spec, target_size, draft_size)
    if target_size == draft_size:
        return None
    config = draft.hf_config
    if is_head and getattr(config, "draft_vocab_size", None) in (None, draft_size):
        config.draft_vocab_size = target_size
    draft.hf_text_config.vocab_size = target_size
    draft.model_arch_config = draft.get_model_arch_config()
    return draft_size


def _check_head(spec: "SpeculativeConfig", target_size: int, draft_size: int) -> None:
    if draft_size < target_size - VOCAB_PADDING:
        raise ValueError(
            f"vocab_size of {spec.model} ({draft_size}) must be the target's "
            f"({target_size}), or more: use a head that was trained for this target."
        )
    reduced = getattr(spec.draft_model_config.hf_config, "draft_vocab_size", None)
    if reduced is not None and not 0 < reduced <= draft_size:
        raise ValueError(
            f"draft_vocab_size of {spec.model} ({reduced}) must be from 1 to its "
            f"vocab_size ({draft_size}): correct it in config.json."
        )


def check_tokens(spec: "SpeculativeConfig", target_size: int, draft_size: int) -> None:
    """Refuses a draft model whose tokens are not the target's.

    If the sizes are equal, vLLM never reads the draft model's tokenizer, so that it may
    be missing or broken; if only some tokens differ then, one log line says so.
    """
    target, is_same_size = spec.target_model_config, target_size == draft_size
    # Not that of draft_model_config, which is the target's.
    named = (target.tokenizer, target.tokenizer_revision), (spec.model, spec.revision)
    files = [find_file(name, TOKENIZER, revision) for name, revision in named]
    if is_same_size and (None in files or cmp(*files, shallow=False)):
        return
    try:
        theirs, ours = (
            _tokens(file, *at, target.trust_remote_code)
            for file, at in zip(files, named, strict=True)
        )
    except ValueError as error:
        if not is_same_size:
            raise
        logger.warning("The drafter's tokens are not compared: %s", error)
        return
    theirs = without_media(theirs, target.hf_config)
    different = list(_different_tokens(theirs, ours))
    reason = why_different(theirs, ours, min(target_size, draft_size))
    if is_same_size and len(different) <= MAX_DIFFERENT * len(ours):
        if different:
            logger.warning(
                "%s has %d tokens that are not the target's, such as %d, %r: drafts of "
                "them are wrong.",
                spec.model,
                len(different),
                *reversed(different[0]),
            )
    elif reason is not None:
        raise ValueError(
            f"{spec.model} has {draft_size} tokens and the target {target_size}, and "
            f"{reason}: use a draft model of the target's own family, or set "
            "use_heterogeneous_vocab."
        )


def map_vocabularies(spec: "SpeculativeConfig") -> VocabMapping | None:
    """Maps a draft model's tokens to the target's tokens of the same spelling.

    On the CPU; None if both have to have the same tokens. Refuses vocabularies that
    share hardly any, and tokenizers that cannot be loaded.
    """
    from vllm.tokenizers import get_tokenizer

    if not spec.use_heterogeneous_vocab or spec.method != "draft_model":
        return None  # vLLM refuses it for heads
    target, draft = spec.target_model_config, spec.draft_model_config
    trust = {"trust_remote_code": target.trust_remote_code}
    named = (target.tokenizer, target.tokenizer_revision), (spec.model, spec.revision)
    sizes = target_size, draft_size = target.get_vocab_size(), draft.get_vocab_size()
    try:
        tokenizers = (get_tokenizer(name, revision=at, **trust) for name, at in named)
        mapping = VocabMapping(*tokenizers, *sizes, torch.device("cpu"))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"use_heterogeneous_vocab needs the tokenizers of {spec.model} and of the "
            f"target, with an unk_token or an eos_token: {error}"
        ) from None
    if mapping.intersection_size < LEAST_COMMON * min(sizes):
        raise ValueError(
            f"{spec.model} has {mapping.intersection_size} of its {draft_size} tokens "
            f"in common with the target, which has {target_size}, and "
            "use_heterogeneous_vocab drafts no others: use a draft model whose "
            "tokenizer is closer to the target's."
        )
    if mapping.draft_unk_token_id >= draft_size:
        raise ValueError(
            f"The unk_token or eos_token of {spec.model} is token "
            f"{mapping.draft_unk_token_id}, but its vocab_size is {draft_size}: "
            "correct its tokenizer_config.json."
        )
    return mapping


def without_media(tokens: Tokens, config: "PretrainedConfig") -> Tokens:
    """Leaves out tokens that stand for images, audio and video, or mark them.

    A draft model never has to draft them, and may lack rows for them, as Gemma 3 1B
    does, which drafts for 27B.
    """
    media = {number for name, number in vars(config).items() if MEDIA.match(name)}
    return {token: number for token, number in tokens.items() if number not in media}


def _tokens(
    file: Path | None, model: str, revision: str | None, trust_remote_code: bool
) -> Tokens:
    """Ids of the tokens in a tokenizer.json, or of another tokenizer; empty if there is
    none. Refuses a broken tokenizer.json."""
    if file is None:
        from transformers import AutoTokenizer

        trust = {"trust_remote_code": trust_remote_code}
        try:
            return AutoTokenizer.from_pretrained(
                model, revision=revision, **trust
            ).get_vocab()
        except (OSError, ValueError, ImportError):
            return {}
    tokenizer = parse_json(file)
    try:
        tokens = tokenizer["model"]["vocab"]
        if isinstance(tokens, list):  # Unigram; BPE and WordPiece map tokens to ids
            tokens = {token: number for number, (token, _) in enumerate(tokens)}
        added = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    except (LookupError, TypeError, ValueError):
        raise ValueError(f"{file} holds no tokenizer: {AGAIN}.") from None
    return tokens | added


def why_different(target: Tokens, draft: Tokens, num_common: int) -> str | None:
    """Why two tokenizers do not have the same tokens, given the ids of each and the
    number of rows that both models have; None if they do."""
    if not draft:
        return "it has no tokenizer to compare with the target's"
    if not target:
        return "the target's tokenizer cannot be loaded to compare its own with"
    if max(target.values(), default=0) >= num_common:
        return "it has no row for some of the target's tokens"
    if different := next(_different_tokens(target, draft), None):
        token, number = different
        return f"its token {number}, {token!r}, is not the target's"
    return None


def _different_tokens(target: Tokens, draft: Tokens) -> Iterator[tuple[str, int]]:
    """The draft's tokens, with their ids, that conflict with the target's.

    A token that only one of them has, such as PARD's mask token, does not conflict if
    the other has no token of that id.
    """
    names = {number: token for token, number in target.items()}
    for token, number in draft.items():
        if names.get(number, token) != token or target.get(token, number) != number:
            yield token, number


# Positions and layers.


def find_context(spec: "SpeculativeConfig") -> int | None:
    """Number of positions that a drafter can draft at; None: all of the target's.

    A draft model has its own context. EAGLE heads share the target's positions,
    whatever their config says, and have fewer only if the user sets `max_model_len`.
    Refuses drafts that would never fit.
    """
    drafts, target = spec.num_speculative_tokens, spec.target_model_config.max_model_len
    lengths = {"num_speculative_tokens": drafts, "draft_tree": spec.draft_tree or 0}
    for key, length in lengths.items():
        if length >= target:
            raise ValueError(
                f"{key} ({length}) must be below the target's max_model_len "
                f"({target}): lower it."
            )
    context = spec.max_model_len
    if spec.method == "draft_model":
        context = spec.draft_model_config.max_model_len
    if context is not None and drafts >= context:
        raise ValueError(
            f"num_speculative_tokens ({drafts}) must be below the drafter's context "
            f"({context}): lower it, or raise max_model_len of speculative_config or "
            "max_position_embeddings of the drafter."
        )
    return context if context is not None and context < target else None


def find_mask_token(spec: "SpeculativeConfig") -> int | None:
    """The mask token's id; None for autoregressive drafting. Refuses an invalid one."""
    if not spec.parallel_drafting:
        return None
    if spec.method in ("eagle", "mtp"):
        raise ValueError(
            "parallel_drafting needs a drafter with a learned mask_hidden, which "
            f'method "{spec.method}" lacks: use an EAGLE-3 style checkpoint '
            '(P-EAGLE) with method "eagle3".'
        )
    mask = get_mask_token_id(spec.draft_model_config.hf_config)
    vocab = spec.draft_model_config.get_vocab_size()
    if type(mask) is not int or not 0 <= mask < vocab:
        raise ValueError(
            f"parallel_drafting needs a mask token of the draft model's {vocab} "
            f"tokens, but its config names {mask!r}: correct mask_token_id, "
            "pard_token or ptd_token_id in config.json, or unset parallel_drafting."
        )
    return mask


def find_tapped_layers(spec: "SpeculativeConfig") -> tuple[int, ...] | None:
    """Ids of the target's layers whose inputs a head is fed: None for the target's
    defaults, empty for its output. Refuses heads for another target."""
    from vllm.v1.worker.gpu.spec_decode.eagle import eagle3_utils

    config, target = spec.draft_model_config.hf_config, spec.target_model_config
    is_block = spec.method in BLOCK_METHODS
    is_fed = spec.method == "eagle3" and takes_aux_hidden_states(config)
    if not (is_block or is_fed):
        return ()
    width = getattr(config, "target_hidden_size", None)
    if width is not None and width != target.get_hidden_size():
        raise ValueError(
            f"target_hidden_size of {spec.model} ({width}) must be the target's "
            f"hidden size ({target.get_hidden_size()}): use a head that was trained "
            "for this target."
        )
    ids = eagle3_utils.get_eagle3_aux_layers_from_config(spec)
    depth, named = target.get_total_num_hidden_layers(), ids or ()
    if len(set(named)) < len(named) or not all(0 <= i <= depth for i in named):
        key = "target_layer_ids + 1" if is_block else TAPPED_LAYERS
        raise ValueError(
            f"{key} of {spec.model} {list(named)} must be different layers from 0 to "
            f"{depth} of the target: use a head that was trained for this target, or "
            "correct them in config.json."
        )
    return ids


def check_block(spec: "SpeculativeConfig") -> None:
    """Refuses a DFlash or DSpark drafter that would not be run as it was trained."""
    config = spec.draft_model_config.hf_config
    nested = getattr(config, "dflash_config", None) or {}
    for key, refused in UNKNOWN_BLOCKS[spec.method].items():
        if (value := nested.get(key, getattr(config, key, None))) in refused:
            raise ValueError(
                f"{key} in {spec.model}/config.json is {value!r}, which vLLM's "
                f"{spec.method} does not draft with: use another checkpoint."
            )
    if not spec.is_xpress():
        return
    steps = getattr(config, "num_speculative_steps", 15)
    longest = (getattr(config, "xpress_block_size", None) or steps + 1) - 1
    if spec.num_speculative_tokens != longest:
        raise ValueError(
            f"num_speculative_tokens ({spec.num_speculative_tokens}) must be {longest} "
            f"with {spec.model}, which mixes whole blocks: leave it out."
        )
    if (drawn := spec.draft_sample_method) != "greedy":
        raise ValueError(
            f'XPress does not support draft_sample_method="{drawn}": leave it unset.'
        )


def correct_depth(spec: "SpeculativeConfig", family: str | None) -> None:
    """Corrects `num_hidden_layers` of heads that give the target's number of layers.

    SafeAILab's code ignores it and builds one layer. Their heads for Vicuna say 40.
    """
    draft = spec.draft_model_config
    if family != ONE_LAYER or draft.hf_config.num_hidden_layers == 1:
        return
    is_folder = Path(spec.model).is_dir()
    names = tensor_names(spec.model, None) if is_folder else ()
    if any(re.search(r"\blayers\.[1-9]", name) for name in names):
        return
    logger.info(
        "%s names %d layers; a head of its kind has one, whatever it says.",
        spec.model,
        draft.hf_config.num_hidden_layers,
    )
    draft.hf_config.num_hidden_layers = draft.hf_text_config.num_hidden_layers = 1
    draft.model_arch_config = draft.get_model_arch_config()


def check_architecture(spec: "SpeculativeConfig") -> None:
    """Refuses layers that cannot draft, or not within `draft_window`.

    The state of a Mamba or linear-attention layer includes all tokens that it has
    processed, rejected drafts among them.
    """
    draft, window = spec.draft_model_config, spec.draft_window
    heads = getattr(draft.hf_text_config, "num_attention_heads", None)
    shared = getattr(draft.hf_text_config, "num_key_value_heads", None) or 1
    # Some models have a list, with a number for each layer.
    if isinstance(heads, int) and isinstance(shared, int) and heads % shared:
        raise ValueError(
            f"num_attention_heads of {spec.model} ({heads}) must be a multiple of "
            f"num_key_value_heads ({shared}): correct them in config.json."
        )
    if spec.method == "draft_model" and draft.has_inner_state:
        raise ValueError(
            f"{spec.model} ({draft.architectures[0]}) has layers with a state, as "
            "Mamba or linear attention have, which cannot be taken back to the last "
            "accepted token: use a draft model with attention alone."
        )
    if window is None:
        return
    layer_window = draft.get_sliding_window() or 0
    if layer_window > window:
        raise ValueError(
            f"draft_window ({window}) must be at least the window that layers of "
            f"{spec.model} have of their own ({layer_window}): raise it, or unset it."
        )
    if draft.attention_chunk_size is not None:
        raise ValueError(
            f"draft_window does not support {spec.model}, some layers of which attend "
            "to chunks in the place of all tokens: unset it."
        )
    drafts, longest = (
        spec.num_speculative_tokens,
        spec.target_model_config.max_model_len,
    )
    if not drafts < window < longest:
        logger.warning(
            "draft_window (%d) should be above num_speculative_tokens (%d) and below "
            "the target's max_model_len (%d), since the drafter sees little but its "
            "own drafts, or all: set it to the context that it was trained for, or "
            "unset it.",
            window,
            drafts,
            longest,
        )


# PARD-2's features of the target.


class _IncompatibleTarget(Exception):
    """Why a drafter cannot be fed the target's hidden states, and what to do."""


def find_target_features(
    vllm_config: "VllmConfig", is_unified: bool
) -> TargetFeatures | None:
    """The target's hidden states that a PARD-2 drafter is fed; None if it has to draft
    without them, which is logged. Refuses a projection that contradicts its config."""
    spec = vllm_config.speculative_config
    try:
        features = _read_features(spec)
        if not is_unified:
            raise _IncompatibleTarget(
                "the unified speculator does not run. Run Model Runner V2, and leave "
                "off what keeps drafting from it"
            )
        if features.tapped and vllm_config.parallel_config.pipeline_parallel_size > 1:
            raise _IncompatibleTarget(
                "the last pipeline stage, which drafts, lacks those of other stages. "
                "Use tensor_parallel_size"
            )
    except _IncompatibleTarget as why:
        log_without_target(spec.model, str(why))
        return None
    # vLLM reads from here which layers' hidden states the target returns.
    config = spec.draft_model_config.hf_config
    config.eagle_aux_hidden_state_layer_ids = list(features.tapped)
    return features


def log_without_target(model: str, why: str) -> None:
    logger.warning(
        "%s drafts without the target's hidden states, from which a PARD-2 drafter "
        "drafts better: %s.",
        model,
        why,
    )


def _read_features(spec: "SpeculativeConfig") -> TargetFeatures:
    draft, target = spec.draft_model_config, spec.target_model_config
    warp = find_file(spec.model, WARP, spec.revision)
    if warp is None:
        raise _IncompatibleTarget(f"it has no {WARP}. Download that file too")
    tensors = load_warp(warp)
    config, where = draft.hf_config, f"in {spec.model}/config.json"
    has_bias = BIAS in tensors
    if _get(config, "pard2_proj_bias", has_bias) != has_bias:
        raise ValueError(
            f"pard2_proj_bias {where} contradicts {warp}, which "
            f"has {'a' if has_bias else 'no'} {BIAS}: correct it, or {AGAIN}."
        )
    scale, size = _get(config, "pard2_scale", 0.02), _get(config, "pard2_target_dim", 0)
    check_finite(f"pard2_scale {where}", scale)
    check_finite(f"pard2_target_dim {where}", size)
    has_many = _get(config, "pard2_ml", size > 10000)
    usual = MANY_LAYERS if has_many else MANY_LAYERS[:1]
    named = _get(config, "pard2_target_layers", usual)
    check_integers(f"pard2_target_layers {where}", named)
    depth, width = target.get_total_num_hidden_layers(), target.get_hidden_size()
    other = "Use a drafter that was trained for this target"
    if not all(-depth - 1 <= layer <= depth for layer in named):
        raise _IncompatibleTarget(
            f"it is fed layers {list(named)}, and the target has {depth}. {other}"
        )
    fed = tuple(tensors[WEIGHT].shape)
    wanted = (draft.get_hidden_size(), len(named) * width)
    if fed != wanted:
        raise _IncompatibleTarget(
            f"{WEIGHT} has shape {list(fed)}, and {len(named)} layers of this target "
            f"need {list(wanted)}. {other}"
        )
    # Indices into the depth + 1 hidden states that transformers returns.
    layers = tuple(layer % (depth + 1) for layer in named)
    return TargetFeatures(layers, depth, float(scale), warp)


def _get(config: Any, key: str, default: Any) -> Any:
    """The value of a key, which may have another name."""
    values = (getattr(config, name, None) for name in (key, *OLD_NAMES.get(key, ())))
    return next((value for value in values if value is not None), default)


def warp_here(spec: "SpeculativeConfig") -> Path:
    """The projection's file on this machine.

    A model on the hub may have been resolved on another machine, with another cache.
    """
    warp = spec.drafter.target_features.warp
    if not warp.is_file():
        warp = find_file(spec.model, WARP, spec.revision) or warp
    return warp


def load_warp(file: Path) -> dict[str, torch.Tensor]:
    """The projection's tensors, on the CPU; no code in the file is run. Refuses a file
    that is broken or holds anything else."""
    try:
        tensors = torch.load(file, map_location="cpu", weights_only=True)
    except (UnpicklingError, RuntimeError, EOFError, ValueError) as error:
        first = str(error).partition("\n")[0]
        raise ValueError(
            f"{file} is broken, or holds more than tensors, which is not loaded "
            f"({first}): {AGAIN}, from a source that you trust."
        ) from None
    names = sorted(tensors) if isinstance(tensors, dict) else []
    if names not in ([WEIGHT], [BIAS, WEIGHT]):
        raise ValueError(
            f"{file} must hold {WEIGHT}, and may hold {BIAS}, but holds "
            f"{names or type(tensors).__name__}: {AGAIN}."
        )
    return tensors
