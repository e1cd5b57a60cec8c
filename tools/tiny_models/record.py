# SPDX-License-Identifier: Apache-2.0
"""What the bundled drafters say of the target's text, recorded.

``python -m tools.tiny_models.record`` writes files where benchmarks look for them (see
``benchmarks/spec_decode/traces.py``). The target continues held-out prompts, greedily
or sampled; at each position each drafter drafts behind the text so far. Plain PyTorch
on the CPU, some ten minutes.
"""

import argparse
import platform
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import transformers
from transformers import AutoTokenizer, LlamaForCausalLM

from benchmarks.spec_decode.traces import FOLDER, NO_RANK, Trace, tokens_per_step

from . import corpus, drafting

PROMPT_TOKENS, OUTPUT_TOKENS = 128, 128
PER_MODULE = 6
DEPTH, WIDTH = 8, 16
# By name: the temperature, and every how many-th prompt is continued.
TEXTS = {"greedy": (0.0, 1), "t0.5": (0.5, 1), "t0.8": (0.8, 2)}
# Greedy text of a small model ends in a loop, where everything is accepted: a text is
# cut where it repeats as many of its own tokens.
LOOP = 10


@dataclass(frozen=True)
class Text:
    """The target's continuation of a prompt.

    Attributes:
        ids: [tokens], the prompt too, and what was written behind the last position.
        positions: newest tokens to draft behind, from the first output token on.
    """

    ids: torch.Tensor
    positions: range


def prompts(models: Path, stdlib: Path) -> torch.Tensor:
    """[prompts, PROMPT_TOKENS], beginnings of lines of the held-out modules."""
    tokenizer = AutoTokenizer.from_pretrained(models / "target")
    texts = corpus.read_texts(corpus.held_out_files(stdlib))
    tails = [tail for text in texts for tail in corpus.excerpts(text, PER_MODULE)]
    rows = tokenizer(tails)["input_ids"]
    return torch.tensor(
        [row[:PROMPT_TOKENS] for row in rows if len(row) >= PROMPT_TOKENS]
    )


def write_texts(
    target: LlamaForCausalLM, asked: torch.Tensor, temperature: float
) -> list[Text]:
    sampling = (
        {"do_sample": True, "temperature": temperature, "top_k": 0}
        if temperature
        else {"do_sample": False}
    )
    torch.manual_seed(0)
    end = target.config.eos_token_id
    rows = target.generate(
        asked,
        attention_mask=torch.ones_like(asked),
        max_length=PROMPT_TOKENS + OUTPUT_TOKENS + DEPTH,
        pad_token_id=end,
        **sampling,
    )
    texts = [_text(row, end, is_cut=not temperature) for row in rows]
    return [text for text in texts if len(text.positions)]


def _text(ids: torch.Tensor, end: int, is_cut: bool) -> Text:
    ends = (ids[PROMPT_TOKENS:] == end).nonzero()
    if len(ends):
        ids = ids[: PROMPT_TOKENS + int(ends[0]) + 1]
    last = len(ids) - DEPTH
    if is_cut:
        last = min(last, PROMPT_TOKENS + until_loop(ids[PROMPT_TOKENS:].tolist()))
    return Text(ids, range(PROMPT_TOKENS, last))


def until_loop(tokens: list[int]) -> int:
    """Tokens before the last one of the first LOOP that stood there before."""
    seen = set()
    for end in range(LOOP, len(tokens) + 1):
        gram = tuple(tokens[end - LOOP : end])
        if gram in seen:
            return end - 1
        seen.add(gram)
    return len(tokens)


def record(
    drafter: drafting.Drafter, target: LlamaForCausalLM, texts: list[Text]
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Of each text, probs [rows, DEPTH, width] and ranks [rows, DEPTH]."""
    for text in texts:
        ids, first = text.ids, text.positions.start
        states = target(ids[None], output_hidden_states=True).hidden_states
        width = WIDTH if drafter.is_parallel else 1
        probs, tokens = drafting.draft(
            drafter, ids, [layer[0] for layer in states], text.positions, DEPTH, width
        )
        wanted = ids[first + 1 :].unfold(0, DEPTH, 1)[: len(text.positions)]
        yield probs.numpy(), ranks_of(tokens, wanted, drafter.is_parallel).numpy()


def ranks_of(
    tokens: torch.Tensor, wanted: torch.Tensor, is_parallel: bool
) -> torch.Tensor:
    """Where each wanted token stands among the candidates of its depth.

    Args:
        tokens: [rows, depth, width].
        wanted: [rows, depth].
        is_parallel: candidates do not depend on those of lower depths; else nothing
            counts behind the first depth whose best candidate is wrong.
    """
    hits = tokens == wanted[..., None]
    ranks = torch.where(hits.any(-1), hits.int().argmax(-1), NO_RANK)
    if not is_parallel:
        follows = (ranks == 0).cumprod(-1).bool()
        ranks = torch.where(follows, ranks, NO_RANK)
    return ranks.to(torch.uint8)


def describe(trace: Trace) -> dict[str, object]:
    """Tokens of a step, for the header."""
    chains = {k: round(tokens_per_step(trace, k), 3) for k in range(1, DEPTH + 1)}
    if trace.probs.shape[-1] == 1:
        return {"chain": chains}
    trees = {
        n: round(tokens_per_step(trace, DEPTH, n, num_chain=min(n, DEPTH)), 3)
        for n in (15, 31, 63)
    }
    free = {n: round(tokens_per_step(trace, DEPTH, n), 3) for n in (7, 15, 31, 63)}
    return {"chain": chains, "tree": trees, "tree_without_chain": free}


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.tiny_models.record")
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    parser.add_argument("--models", type=Path, default=Path("models"))
    parser.add_argument("--stdlib", type=Path, default=stdlib)
    parser.add_argument("--out", type=Path, default=FOLDER)
    names = list(drafting.DRAFTERS)
    parser.add_argument("--drafters", nargs="+", choices=names, default=names)
    parser.add_argument("--texts", nargs="+", choices=TEXTS, default=list(TEXTS))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    target = drafting.load_llama(args.models / "target")
    asked = prompts(args.models, args.stdlib)
    for name in args.texts:
        temperature, stride = TEXTS[name]
        texts = write_texts(target, asked[::stride], temperature)
        for drafter_name in args.drafters:
            drafter = drafting.load(drafter_name, args.models, target)
            rows = list(record(drafter, target, texts))
            header = {
                "command": "python -m tools.tiny_models.record",
                "date": time.strftime("%Y-%m-%d"),
                "target": "models/target",
                "drafter": f"models/{drafter_name}",
                "temperature": temperature,
                "cut_at_loops": not temperature,
                "texts": len(texts),
                "rows": sum(len(text.positions) for text in texts),
                "software": f"Python {platform.python_version()}, torch "
                f"{torch.__version__}, transformers {transformers.__version__}",
            }
            trace = Trace(
                np.concatenate([probs for probs, _ in rows]).astype(np.float32),
                np.concatenate([ranks for _, ranks in rows]),
                np.array([len(text.positions) for text in texts]),
                header,
            )
            header["tokens_per_step"] = describe(trace)
            trace.save(args.out / f"{drafter_name}-{name}.npz")
            print(f"{drafter_name}-{name}: {header['tokens_per_step']}", flush=True)


if __name__ == "__main__":
    main()
