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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from filecmp import cmp
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any

import torch
from tokenizers import Tokenizer

from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.spec_decode.vocab_mapping import VocabMapping

from . import BLOCK_METHODS, DrafterConfig, TargetFeatures, first_of
from .files import (
    AGAIN,
    TAPPED_LAYERS,
    check_finite,
    check_integers,
    find_file,
    first_set,
    takes_aux_hidden_states,
    tensor_names,
)

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
# Config keys of the mask token's id: of speculators and NeMo, of PARD, of Amazon's
# P-EAGLE. The first one found is used.
MASK_TOKEN_KEYS = ("mask_token_id", "pard_token", "ptd_token_id")
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
    if spec.method == "draft_model":
        check_tokens(spec, target_size, draft_size)
    elif draft_size < target_size - VOCAB_PADDING:
        raise ValueError(
            f"vocab_size of {spec.model} ({draft_size}) must be the target's "
            f"({target_size}), or more: use a head that was trained for this target."
        )
    config = draft.hf_config
    reduced = getattr(config, "draft_vocab_size", None)
    if reduced is not None and not 0 < reduced <= draft_size:
        raise ValueError(
            f"draft_vocab_size of {spec.model} ({reduced}) must be from 1 to its "
            f"vocab_size ({draft_size}): correct it in config.json."
        )
    if target_size == draft_size:
        return None
    if spec.method != "draft_model" and reduced in (None, draft_size):
        config.draft_vocab_size = target_size
    draft.hf_text_config.vocab_size = target_size
    draft.model_arch_config = draft.get_model_arch_config()
    return draft_size


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
    theirs, ours = (
        _tokens(file, *at, target.trust_remote_code)
        for file, at in zip(files, named, strict=True)
    )
    theirs = without_media(theirs, target.hf_config)
    different = list(_different_tokens(theirs, ours))
    if is_same_size and len(different) <= MAX_DIFFERENT * len(ours):
        if different:
            logger.warning(
                "%s has %d tokens that are not the target's, such as %d, %r: drafts of "
                "them are wrong.",
                spec.model,
                len(different),
                *reversed(different[0]),
            )
        return
    reason = why_different(theirs, ours, min(target_size, draft_size))
    if reason is not None:
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
        if (unknown := mapping.draft_unk_token_id) >= draft_size:
            raise ValueError(f"token {unknown}, of vocab_size {draft_size}, is none.")
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
    none, or it is broken."""
    if file is not None:
        with suppress(Exception):  # its only type
            return Tokenizer.from_file(str(file)).get_vocab()
        return {}
    from transformers import AutoTokenizer

    how = {"revision": revision, "trust_remote_code": trust_remote_code}
    with suppress(OSError, ValueError, ImportError):
        return AutoTokenizer.from_pretrained(model, **how).get_vocab()
    return {}


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
    target = spec.target_model_config.max_model_len
    context = spec.max_model_len or target
    if spec.method == "draft_model":
        context = spec.draft_model_config.max_model_len
    drafts = "num_speculative_tokens", spec.num_speculative_tokens
    for (key, length), whose, limit in (
        (drafts, "the target's max_model_len", target),
        (("draft_tree", spec.draft_tree or 0), "the target's max_model_len", target),
        (drafts, "the drafter's context", context),
    ):
        if length >= limit:
            raise ValueError(
                f"{key} ({length}) must be below {whose} ({limit}): lower it, or raise "
                "max_model_len."
            )
    return context if context < target else None


def find_mask_token(spec: "SpeculativeConfig") -> int | None:
    """The mask token's id; None for autoregressive drafting. Refuses an invalid one."""
    if not spec.parallel_drafting:
        return None
    mask = first_set(spec.draft_model_config.hf_config, *MASK_TOKEN_KEYS)
    vocab = spec.draft_model_config.get_vocab_size()
    named = f"a config that names {mask!r}"
    if has_none := spec.method in ("eagle", "mtp"):
        named = f'a drafter of method "{spec.method}"'
    if has_none or type(mask) is not int or not 0 <= mask < vocab:
        raise ValueError(
            f"parallel_drafting needs a drafter trained for it, with a mask token of "
            f"its {vocab} tokens, not {named}: unset parallel_drafting, or a method "
            'that means it such as "pard", or correct mask_token_id, pard_token or '
            "ptd_token_id in config.json."
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


# What the engine and the target's layers support.


def check_parallelism(vllm_config: "VllmConfig", is_fitted: bool) -> None:
    """Refuses pipeline stages where drafting does not support them.

    On a CPU neither of vLLM's runners drafts with several stages. Only the last stage
    knows the draft tree, and vLLM's own speculators would split a draft model into
    stages as the target is.
    """
    spec, parallel = vllm_config.speculative_config, vllm_config.parallel_config
    stages = parallel.pipeline_parallel_size
    named = f"pipeline_parallel_size ({stages}) does not support"
    if stages == 1:
        return
    if spec.draft_tree is not None:
        raise ValueError(
            f"{named} draft_tree ({spec.draft_tree}): unset it, or use "
            "tensor_parallel_size."
        )
    if not is_fitted and (spec.method == "draft_model" or spec.parallel_drafting):
        raise ValueError(
            f"{named} draft models and parallel drafting where vLLM's own speculators "
            "draft: use tensor_parallel_size, or an EAGLE-3 head with "
            "parallel_drafting=false."
        )
    if current_platform.is_cpu():
        raise ValueError(
            f"Pipeline stages on a CPU ({stages}) do not support drafters: use "
            "tensor_parallel_size."
        )


def check_layers(vllm_config: "VllmConfig", drafter: DrafterConfig) -> None:
    """Refuses heads fed hidden states that the target does not return, or that Model
    Runner V1 orders otherwise."""
    from vllm.model_executor.model_loader import get_model_cls
    from vllm.model_executor.models.interfaces import supports_eagle3

    spec, ids = vllm_config.speculative_config, list(drafter.tapped_layers or ())
    if ids != sorted(ids) and not vllm_config.use_v2_model_runner:
        raise ValueError(
            f"eagle_aux_hidden_state_layer_ids of {spec.model} {ids} are not in "
            "ascending order, in which Model Runner V1 feeds them: turn V1 off."
        )
    if spec.method != "eagle3" or drafter.tapped_layers == ():
        return
    target = get_model_cls(spec.target_model_config)
    if not supports_eagle3(target):
        raise ValueError(
            f"EAGLE-3 does not support {target.__name__} as a target, which in vLLM "
            f"does not return auxiliary hidden states: use a draft model or PARD "
            f"in the place of {spec.model}."
        )


def settle_ranks(spec: "SpeculativeConfig", is_unified: bool) -> None:
    """Splits a drafter over the ranks, as the target is, if each of them cannot have
    the whole of it; refuses one that cannot be split so."""
    target, draft = spec.target_parallel_config, spec.draft_parallel_config
    size = target.tensor_parallel_size
    if draft is None or draft.tensor_parallel_size == size:
        return
    reasons = {
        "heads, which take the target's embeddings and output layer": (
            spec.method != "draft_model"
        ),
        "mixtures of experts": spec.draft_model_config.is_moe,
        "vLLM's own speculators": not is_unified,
    }
    split = first_of(reasons)
    if split is None:
        return
    logger.warning(
        "draft_tensor_parallel_size=%d does not support %s: %s is split in %d, as the "
        "target is. Leave it unset.",
        draft.tensor_parallel_size,
        split,
        spec.model,
        size,
    )
    spec.draft_tensor_parallel_size = size
    draft = spec.create_draft_parallel_config(target, size, spec.draft_model_config)
    spec.draft_model_config.verify_with_parallel_config(draft)
    spec.draft_parallel_config = draft


# PARD-2's features of the target.


def find_target_features(
    vllm_config: "VllmConfig", is_unified: bool
) -> TargetFeatures | None:
    """The target's hidden states that a PARD-2 drafter is fed; None if it has to draft
    without them, which is logged. Refuses a projection that contradicts its config."""
    spec = vllm_config.speculative_config
    draft, target = spec.draft_model_config, spec.target_model_config
    if (warp := warp_here(spec)) is None:
        log_without_target(spec.model, f"it has no {WARP}. Download that file too")
        return None
    tensors = load_warp(warp)
    named, scale = _read_features(spec, has_bias=BIAS in tensors)
    depth, width = target.get_total_num_hidden_layers(), target.get_hidden_size()
    # Indices into the depth + 1 hidden states that transformers returns.
    layers = tuple(layer % (depth + 1) for layer in named)
    features = TargetFeatures(layers, depth, float(scale))
    is_split = vllm_config.parallel_config.pipeline_parallel_size > 1
    fed = list(tensors[WEIGHT].shape)
    wanted = [draft.get_hidden_size(), len(named) * width]
    other = "Use a drafter that was trained for this target"
    reasons = {
        f"it is fed layers {[*named]}, and the target has {depth}. {other}": not all(
            -depth - 1 <= layer <= depth for layer in named
        ),
        f"{WEIGHT} has shape {fed}, and {len(named)} layers of this target need "
        f"{wanted}. {other}": fed != wanted,
        "the unified speculator does not run. Run Model Runner V2, and leave off what "
        "keeps drafting from it": not is_unified,
        "the last pipeline stage, which drafts, lacks those of other stages. Use "
        "tensor_parallel_size": is_split and features.tapped,
    }
    if (why := first_of(reasons)) is not None:
        log_without_target(spec.model, why)
        return None
    # vLLM reads from here which layers' hidden states the target returns.
    draft.hf_config.eagle_aux_hidden_state_layer_ids = list(features.tapped)
    return features


def log_without_target(model: str, why: str) -> None:
    logger.warning(
        "%s drafts without the target's hidden states, from which a PARD-2 drafter "
        "drafts better: %s.",
        model,
        why,
    )


def _read_features(
    spec: "SpeculativeConfig", has_bias: bool
) -> tuple[Sequence[int], float]:
    """The layers in a PARD-2 drafter's config, and the scale."""
    where = f"in {spec.model}/config.json"

    def get(key: str, default: Any) -> Any:
        config = spec.draft_model_config.hf_config
        return first_set(config, key, *OLD_NAMES[key], default=default)

    if get("pard2_proj_bias", has_bias) != has_bias:
        raise ValueError(
            f"pard2_proj_bias {where} contradicts {WARP}, which "
            f"has {'a' if has_bias else 'no'} {BIAS}: correct it, or {AGAIN}."
        )
    scale, size = get("pard2_scale", 0.02), get("pard2_target_dim", 0)
    check_finite(f"pard2_scale {where}", scale)
    check_finite(f"pard2_target_dim {where}", size)
    usual = MANY_LAYERS if get("pard2_ml", size > 10000) else MANY_LAYERS[:1]
    named = get("pard2_target_layers", usual)
    check_integers(f"pard2_target_layers {where}", named)
    return named, scale


def warp_here(spec: "SpeculativeConfig") -> Path | None:
    """The projection's file on this machine, maybe not the one that resolved it."""
    return find_file(spec.model, WARP, spec.revision)


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
