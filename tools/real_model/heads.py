# SPDX-License-Identifier: Apache-2.0
"""The heads: how each is trained, and what of its file is the target's."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tools.overlay.base import ROOT, OverlayError

# Hidden states that the heads read, as vLLM numbers them: 2, L // 2 and L - 3, which is
# what both vLLM and speculators take by default for this model.
LAYERS = (2, 15, 27)
# A token of the vocabulary that occurs in no text: <empty_output>.
MASK_TOKEN_ID = 16
DRAFT_VOCAB_SIZE = 8192
VOCAB_SIZE = 49152
K = 8
# Arguments of `speculators train`, those that differ from its defaults. Attention over
# the whole text, and in both directions in a block: the same in each engine.
BLOCKS = dict(max_anchors=1024, block_size=K + 1, full_attention_indices=[*range(5)])
SMALL = {"num_layers": 3, "full_attention_indices": [0, 1, 2]}
HEADS: dict[str, dict[str, object]] = {
    "eagle3": {"ttt_steps": 5, "full_attention_indices": [0]},
    "peagle": {
        "draft_config": ROOT / "models/smollm2-peagle",
        "draft_vocab_size": VOCAB_SIZE,
        "num_depths": K,
        "max_anchors": 4096,
        "down_sample_ratio": 0.8,  # of each deeper draft, by default 0.7 and 0.2
        "down_sample_ratio_min": 0.4,
    },
    "dflash": BLOCKS | SMALL | {"sliding_window_non_causal": True},
    # Its candidates are of the whole vocabulary.
    "dflash2": BLOCKS | {"selector_rank": 64, "draft_vocab_size": VOCAB_SIZE},
    "dspark": BLOCKS | {"markov_rank": 64},
}
EMBED, LM_HEAD = "embed_tokens.weight", "lm_head.weight"
SLIM = "slim.json"


def slim(head: Path, model: Path, out: Path) -> None:
    """Copies a head without the tensors that are rows of the target's embeddings.

    The target's `lm_head` is its embeddings. `fill` restores the file.
    """
    tensors = _read(head, out, is_slim=False)
    rows = _rows(tensors, model)
    left_out = [n for n, t in rows.items() if torch.equal(tensors.get(n, t[:0]), t)]
    kept = {n: t for n, t in tensors.items() if n not in left_out}
    _write(head, out, kept, model.name)
    (out / SLIM).write_text(json.dumps(left_out) + "\n")


def fill(head: Path, model: Path, out: Path, whole_vocabulary: bool = False) -> None:
    """Copies a slim head with the tensors that `slim` left out.

    One of the `whole_vocabulary` also drafts tokens that the head was not trained for.
    """
    tensors = _read(head, out, is_slim=True)
    if whole_vocabulary:
        _, d2t = (tensors.pop(name, ()) for name in ("t2d", "d2t"))
        if any(t.shape[:1] == (len(d2t),) for t in tensors.values()):
            raise OverlayError(f"{head} has weights of its own for {len(d2t)} tokens")
    rows = _rows(tensors, model)
    tensors |= {name: rows[name] for name in json.loads((head / SLIM).read_text())}
    _write(head, out, tensors, str(model))


def _rows(tensors: dict[str, torch.Tensor], model: Path) -> dict[str, torch.Tensor]:
    table = load_file(model / "model.safetensors")["model." + EMBED]
    # A copy also of all rows: one tensor cannot be saved under two names.
    return {EMBED: table, LM_HEAD: table[tensors.get("t2d", slice(None))].clone()}


def _read(head: Path, out: Path, is_slim: bool) -> dict[str, torch.Tensor]:
    if not (head / "model.safetensors").exists():
        raise OverlayError(f"{head} is no head: it has no model.safetensors")
    if (head / SLIM).exists() != is_slim:
        raise OverlayError(f"{head} is {'not slim' if is_slim else 'slim already'}")
    if out.resolve() == head.resolve():
        raise OverlayError("--out is the head: name another folder")
    return load_file(head / "model.safetensors")


def _write(head: Path, out: Path, tensors: dict[str, torch.Tensor], name: str) -> None:
    config = json.loads((head / "config.json").read_text())
    # In place of its path on the machine that the head was trained on.
    config["speculators_config"]["verifier"]["name_or_path"] = name
    if LM_HEAD in tensors:
        config["draft_vocab_size"] = len(tensors[LM_HEAD])
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
