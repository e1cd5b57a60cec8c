# SPDX-License-Identifier: Apache-2.0
"""Checks a drafter's vocabulary against the target's: size, and draft models' tokens.

The two may be padded differently: Qwen2.5-0.5B has 151936 rows and Qwen2.5-7B 152064,
for the same 151665 tokens. Heads have no tokenizer, and may draft only some of the
target's tokens. With `use_heterogeneous_vocab` a draft model has other tokens, and
drafts only those that the target has too.
"""

import re
from collections.abc import Iterator, Mapping
from filecmp import cmp
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from vllm.logger import init_logger
from vllm.v1.spec_decode.vocab_mapping import VocabMapping

from .families import AGAIN
from .files import find_file, parse_json

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from vllm.config.model import ModelConfig
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


def match_vocabularies(spec: "SpeculativeConfig") -> int | None:
    """Gives a drafter the target's vocabulary size, if only padding differs.

    Sets `vocab_size` of the draft's config, and `draft_vocab_size` of a head that
    drafts all tokens; loading pads or cuts the checkpoint's rows to it.

    Returns:
        The checkpoint's size if it was changed; else None.

    Raises:
        ValueError: the drafter has other tokens than the target.
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
    """Compares a draft model's tokens with the target's.

    Raises:
        ValueError: they differ; or sizes differ, and there is no tokenizer to compare.
    """
    target = spec.target_model_config
    files = (
        find_file(target.tokenizer, TOKENIZER, target.tokenizer_revision),
        # Not that of draft_model_config, which is the target's.
        find_file(spec.model, TOKENIZER, spec.revision),
    )
    if target_size == draft_size:
        reason = _why_of_another_family(spec.model, *files)
    else:
        theirs = _tokens(files[0], target.tokenizer, target.tokenizer_revision, target)
        theirs = without_media(theirs, target.hf_config)
        ours = _tokens(files[1], spec.model, spec.revision, target)
        reason = why_different(theirs, ours, min(target_size, draft_size))
    if reason is not None:
        raise ValueError(
            f"{spec.model} has {draft_size} tokens and the target {target_size}, and "
            f"{reason}: use a draft model of the target's own family, or set "
            "use_heterogeneous_vocab."
        )


def map_vocabularies(spec: "SpeculativeConfig") -> VocabMapping | None:
    """Maps a draft model's tokens to the target's tokens of the same spelling.

    Returns:
        The mapping, on the CPU; None if both have to have the same tokens.

    Raises:
        ValueError: they share hardly any tokens; or a tokenizer cannot be loaded, or
            the draft model's has no valid token for unknown ones.
    """
    if not spec.use_heterogeneous_vocab or spec.method != "draft_model":
        return None  # vLLM refuses it for heads
    mapping = _map_tokens(spec)
    common, draft_size = mapping.intersection_size, mapping.draft_vocab_size
    target_size = mapping.target_vocab_size
    if common < LEAST_COMMON * min(draft_size, target_size):
        raise ValueError(
            f"{spec.model} has {common} of its {draft_size} tokens in common with the "
            f"target, which has {target_size}, and use_heterogeneous_vocab drafts no "
            "others: use a draft model whose tokenizer is closer to the target's."
        )
    if mapping.draft_unk_token_id >= draft_size:
        raise ValueError(
            f"The unk_token or eos_token of {spec.model} is token "
            f"{mapping.draft_unk_token_id}, but its vocab_size is {draft_size}: "
            "correct its tokenizer_config.json."
        )
    return mapping


def _map_tokens(spec: "SpeculativeConfig") -> VocabMapping:
    from vllm.tokenizers import get_tokenizer

    target, draft = spec.target_model_config, spec.draft_model_config
    trust = {"trust_remote_code": target.trust_remote_code}
    named = (target.tokenizer, target.tokenizer_revision), (spec.model, spec.revision)
    try:
        tokenizers = (get_tokenizer(name, revision=at, **trust) for name, at in named)
        sizes = target.get_vocab_size(), draft.get_vocab_size()
        return VocabMapping(*tokenizers, *sizes, torch.device("cpu"))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"use_heterogeneous_vocab needs the tokenizers of {spec.model} and of the "
            f"target, with an unk_token or an eos_token: {error}"
        ) from None


def without_media(tokens: Tokens, config: "PretrainedConfig") -> Tokens:
    """Leaves out tokens that stand for images, audio and video, or mark them.

    A draft model never has to draft them, and may lack rows for them, as Gemma 3 1B
    does, which drafts for 27B.
    """
    media = {number for name, number in vars(config).items() if MEDIA.match(name)}
    return {token: number for token, number in tokens.items() if number not in media}


def _why_of_another_family(
    model: str, target_file: Path | None, draft_file: Path | None
) -> str | None:
    """Why vocabularies of equal size are different; None if they are not.

    vLLM never reads the draft model's tokenizer then, so it may be missing or broken.
    If only some tokens differ, one log line says so.
    """
    if target_file is None or draft_file is None or cmp(target_file, draft_file, False):
        return None
    try:
        target, draft = _tokens_of(target_file), _tokens_of(draft_file)
    except ValueError as error:
        logger.warning("The drafter's tokens are not compared: %s", error)
        return None
    different = list(_different_tokens(target, draft))
    if not different:
        return None
    token, number = different[0]
    if len(different) > MAX_DIFFERENT * len(draft):
        return (
            f"{len(different)} of its tokens, such as {number}, {token!r}, are not the "
            "target's"
        )
    logger.warning(
        "%s has %d tokens that are not the target's, such as %d, %r: drafts of them "
        "are wrong.",
        model,
        len(different),
        number,
        token,
    )
    return None


def _tokens(
    file: Path | None, model: str, revision: str | None, target: "ModelConfig"
) -> Tokens:
    """Ids of a tokenizer's tokens; empty if there is none.

    Raises:
        ValueError: its tokenizer.json is broken.
    """
    if file is not None:
        return _tokens_of(file)
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(
            model, revision=revision, trust_remote_code=target.trust_remote_code
        ).get_vocab()
    except (OSError, ValueError, ImportError):
        return {}


def _tokens_of(file: Path) -> Tokens:
    """Ids of the tokens in a tokenizer.json.

    BPE and WordPiece map tokens to ids, Unigram lists them.
    """
    tokenizer = parse_json(file)
    try:
        tokens = tokenizer["model"]["vocab"]
        if isinstance(tokens, list):
            tokens = {token: number for number, (token, _) in enumerate(tokens)}
        added = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    except (LookupError, TypeError, ValueError):
        raise ValueError(f"{file} holds no tokenizer: {AGAIN}.") from None
    return tokens | added


def why_different(target: Tokens, draft: Tokens, num_common: int) -> str | None:
    """Why two tokenizers do not have the same tokens; None if they do.

    Args:
        target: ids of the target's tokens.
        draft: ids of the draft's tokens.
        num_common: rows that both models have.
    """
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
