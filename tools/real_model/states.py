# SPDX-License-Identifier: Apache-2.0
"""The target's hidden states for the text, in the files that speculators reads."""

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from datasets import Dataset
from datasets.table import InMemoryTable
from safetensors.torch import load_file, save_file
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM

from .heads import LAYERS

TOKENS_AT_ONCE = 32768
WRITERS = 8
Texts = list[tuple[torch.Tensor, int]]


class States:
    """The target, which keeps the states that heads read and the last one.

    All are the residual stream: what a layer, or the last norm, is given.
    """

    def __init__(self, model: Path, device: str):
        dtype = torch.float32 if device == "cpu" else torch.bfloat16
        loaded = AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
        self.model, self.device = loaded.model.to(device), device
        self.kept: list[torch.Tensor] = []
        for module in (*(self.model.layers[i] for i in LAYERS), self.model.norm):
            module.register_forward_pre_hook(self._keep)

    def _keep(self, module: Any, given: tuple[torch.Tensor, ...]) -> None:
        self.kept.append(given[0])

    @torch.inference_mode()
    def of(self, ids: list[torch.Tensor]) -> torch.Tensor:
        """[texts, longest, len(LAYERS) + 1, hidden size], on the CPU."""
        self.kept.clear()
        self.model(pad_sequence(ids, batch_first=True).to(self.device), use_cache=False)
        return torch.stack(self.kept, dim=2).cpu()


def write_states(model: Path, text: Path, out: Path, device: str) -> None:
    """Writes the dataset, and the states of its texts."""
    texts = read_text(text)
    write_dataset(texts, out)
    folder = out / "hidden_states"
    folder.mkdir(parents=True, exist_ok=True)
    states = States(model, device)
    with ThreadPoolExecutor(WRITERS) as pool:
        for numbers in batches(texts):
            ids = [texts[number][0] for number in numbers]
            paths = [folder / f"hs_{number}.safetensors" for number in numbers]
            list(pool.map(_save, paths, ids, states.of(ids)))


def _save(path: Path, ids: torch.Tensor, rows: torch.Tensor) -> None:
    save_file({"token_ids": ids, "hidden_states": rows[: len(ids)].contiguous()}, path)


def batches(texts: Texts) -> list[list[int]]:
    """Texts of similar length, together at most TOKENS_AT_ONCE tokens with padding."""
    found: list[list[int]] = [[]]
    for number in sorted(range(len(texts)), key=lambda n: len(texts[n][0])):
        if (len(found[-1]) + 1) * len(texts[number][0]) > TOKENS_AT_ONCE:
            found.append([])
        found[-1].append(number)
    return found


def write_dataset(texts: Texts, out: Path) -> None:
    """Writes what `speculators prepare-data` would: texts, and counts of tokens."""
    masks = [(torch.arange(len(ids)) >= asked).long() for ids, asked in texts]
    columns = {
        "input_ids": [ids.numpy() for ids, _ in texts],
        "loss_mask": [mask.numpy() for mask in masks],
        "seq_len": [len(ids) for ids, _ in texts],
    }
    table = InMemoryTable(pa.table(columns))
    dataset = Dataset(table, fingerprint=str(len(texts)))
    dataset.set_format("torch", columns=[*columns])
    dataset.save_to_disk(out)
    answered = torch.cat([ids[asked:] for ids, asked in texts])
    torch.save(dict(Counter(answered.tolist())), out / "token_freq.pt")


def read_text(folder: Path) -> list[tuple[torch.Tensor, int]]:
    """All parts' texts in order: ids [length] int64, and how many were asked."""
    texts = []
    for path in sorted(folder.glob("text-*.safetensors")):
        part = load_file(path)
        ids = part["ids"].long().split(part["lengths"].tolist())
        texts += zip(ids, part["asked"].tolist(), strict=True)
    return texts
