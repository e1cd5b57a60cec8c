# SPDX-License-Identifier: Apache-2.0
"""What the target's states gain: PARD, PARD-2 and PARD-2 without them, on equal text.

The bundled models in plain PyTorch: no engine, no sampling. While drafts are accepted,
their context is the target's own greedy text, so that text tells which of them are.
"""

import argparse
import json
import platform
import sysconfig
import time
from itertools import chain, product
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoTokenizer, LlamaForCausalLM

from benchmarks.spec_decode import results as files
from benchmarks.spec_decode.draft_probabilities.mean import mean_length
from benchmarks.spec_decode.shapes import BUNDLED

DRAFTERS = {"pard": "pard", "pard2": "pard2", "pard2-unfed": "pard2"}
PROMPT_TOKENS, OUTPUT_TOKENS = 128, 128
BATCH = 36


class Drafter:
    """A PARD draft model, fed the target's states if it is a PARD-2 and they are given.

    Attributes:
        projection: [width, layers * hidden of the target]; None: fed nothing.
        layers: of the target, as transformers counts their states.
    """

    def __init__(self, folder: Path, is_fed: bool) -> None:
        self.model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
        config = json.loads((folder / "config.json").read_text())
        self.mask_token = config["pard_token"]
        self.layers = config.get("pard2_target_layers", [])
        self.projection = None
        if is_fed:
            weights = torch.load(folder / "warp_model.bin", weights_only=True)
            weight = weights["target_proj.weight"].float()
            self.projection = weight * config["pard2_scale"]

    def fed(self, states: list[torch.Tensor]) -> torch.Tensor | float:
        """[length, width]: of each token, the states of the token before it.

        Args:
            states: [length, hidden] each, of every layer of the target.
        """
        if self.projection is None:
            return 0.0
        listed = torch.cat([states[layer] for layer in self.layers], dim=-1)
        return torch.nn.functional.pad(listed[:-1] @ self.projection.T, (0, 0, 1, 0))

    def drafts(
        self, ids: torch.Tensor, states: list[torch.Tensor], first: int, k: int
    ) -> torch.Tensor:
        """[length - first, k]: row i is drafted behind ``ids[: first + i + 1]``."""
        embed = self.model.get_input_embeddings()
        fed = self.fed(states)
        text = self.model(inputs_embeds=(embed(ids) + fed)[None], use_cache=True)
        newest = torch.arange(first, len(ids))
        masks = embed(torch.full((len(newest), k - 1), self.mask_token))
        if self.projection is not None:
            masks = masks + fed[newest, None]
        past = text.past_key_values
        past.batch_repeat_interleave(len(newest))
        out = self.model(
            inputs_embeds=masks,
            attention_mask=_attention(newest, len(ids), k - 1),
            position_ids=newest[:, None] + torch.arange(1, k),
            past_key_values=past,
        )
        ahead = text.logits[0, first:].argmax(-1)
        return torch.cat([ahead[:, None], out.logits.argmax(-1)], dim=1)


def _attention(newest: torch.Tensor, length: int, masks: int) -> torch.Tensor:
    """[rows, 1, masks, length + masks] bool: a mask sees its text, and masks so far."""
    text = torch.arange(length) <= newest[:, None]
    text = text[:, None].expand(-1, masks, -1)
    before = torch.ones(masks, masks, dtype=torch.bool).tril()
    return torch.cat([text, before.expand(len(newest), -1, -1)], dim=-1)[:, None]


def prompts(models: Path, per_module: int) -> dict[str, list[list[int]]]:
    """By held-out module of this interpreter, spans of it that do not overlap."""
    tokenizer = AutoTokenizer.from_pretrained(models / "target")
    folder, found = Path(sysconfig.get_path("stdlib")), {}
    for name in json.loads((models / "held_out.json").read_text()):
        text = (folder / f"{name}.py").read_text()
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        size = PROMPT_TOKENS - 1
        spans = [ids[at : at + size] for at in range(0, len(ids) - size + 1, size)]
        count = min(per_module, len(spans))
        chosen = [spans[len(spans) * i // count] for i in range(count)]
        found[name] = [[tokenizer.bos_token_id, *span] for span in chosen]
    return found


def greedy_text(target: LlamaForCausalLM, ids: list[list[int]], more: int) -> list:
    """Each prompt continued by up to ``more`` tokens; none that ends at once."""
    end = target.config.eos_token_id
    rows = []
    for at in range(0, len(ids), BATCH):
        batch = torch.tensor(ids[at : at + BATCH])
        out = target.generate(
            batch,
            attention_mask=torch.ones_like(batch),
            max_new_tokens=more,
            do_sample=False,
            pad_token_id=end,
        )
        rows += [_until(row, end) for row in out]
    return [row for row in rows if len(row) > PROMPT_TOKENS]


def _until(row: torch.Tensor, end: int) -> torch.Tensor:
    ends = (row[PROMPT_TOKENS:] == end).nonzero()
    return row[: PROMPT_TOKENS + int(ends[0])] if len(ends) else row


def replay(hits: list[list[bool]], k: int) -> list[int]:
    """Drafts accepted in each step of decoding with k drafts.

    Args:
        hits: by newest token, from the first output token on, and by draft.
    """
    steps, at = [], 0
    while at < min(OUTPUT_TOKENS, len(hits) - k):
        accepted = next((n for n in range(k) if not hits[at][n]), k)
        steps.append(accepted)
        at += accepted + 1
    return steps


def hits_of(drafted: torch.Tensor, ids: torch.Tensor, first: int) -> torch.Tensor:
    """Whether row i's draft n is token ``first + i + 1 + n``; same shape."""
    k = drafted.shape[1]
    wanted = torch.nn.functional.pad(ids[first + 1 :], (0, k), value=-1)
    return drafted == wanted.unfold(0, k, 1)


def measure(args: argparse.Namespace, texts: list[torch.Tensor], target: Any) -> dict:
    """Steps of every text, by drafter and K."""
    most = max(args.num_speculative_tokens)
    drafters = {
        name: Drafter(args.models / folder, is_fed=name == "pard2")
        for name, folder in DRAFTERS.items()
    }
    found: dict[tuple[str, int], list[list[int]]] = {
        pair: [] for pair in product(drafters, args.num_speculative_tokens)
    }
    for ids in texts:
        states = target(ids[None], output_hidden_states=True).hidden_states
        states = [layer[0] for layer in states]
        for name, drafter in drafters.items():
            drafted = drafter.drafts(ids, states, PROMPT_TOKENS, most)
            hits = hits_of(drafted, ids, PROMPT_TOKENS).tolist()
            for k in args.num_speculative_tokens:
                found[name, k].append(replay(hits, k))
    return found


def summary(steps: list[list[int]], k: int) -> dict[str, Any]:
    """The mean with its error, and the share of steps that accept each draft."""
    accepted = [count for row in steps for count in row]
    shares = [sum(count > n for count in accepted) / len(accepted) for n in range(k)]
    counts = [(len(row), sum(row) + len(row)) for row in steps]
    return mean_length(counts) | {"by_position": [round(s, 4) for s in shares]}


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.spec_decode.fed_gain", description=__doc__
    )
    add = parser.add_argument
    add("--models", type=Path, default=BUNDLED)
    add("--num-speculative-tokens", type=int, nargs="+", default=[7, 15])
    add("--per-module", type=int, default=24, help="prompts of each held-out module")
    add("--output", type=Path, default=files.RESULTS / "cpu" / "fed-gain.json")
    return parser.parse_args(arguments)


@torch.inference_mode()
def main() -> None:
    args = parse()
    start = time.strftime("%Y-%m-%dT%H:%M:%S")
    target = LlamaForCausalLM.from_pretrained(
        args.models / "target", dtype=torch.float32
    )
    asked = prompts(args.models, args.per_module)
    more = OUTPUT_TOKENS + max(args.num_speculative_tokens) + 1
    texts = greedy_text(target, list(chain(*asked.values())), more)
    found = measure(args, texts, target)
    run = {
        "command": files.command_line("fed_gain"),
        "software": f"Python {platform.python_version()}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}",
        "prompts": {name: len(spans) for name, spans in asked.items()},
        "prompt_tokens": PROMPT_TOKENS,
        "output_tokens": OUTPUT_TOKENS,
    }
    measurements = {
        f"{name}/K{k}": summary(steps, k) for (name, k), steps in found.items()
    }
    files.save(args.output, files.of_run(start, run, "measurements", measurements))
    for key, point in measurements.items():
        length, error = point["acceptance_length"], point["standard_error"]
        print(f"{key}: {length:.3f} ± {error:.3f}", flush=True)


if __name__ == "__main__":
    main()
