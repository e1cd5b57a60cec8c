# SPDX-License-Identifier: Apache-2.0
"""Model cards, made from what training and measuring left beside the weights."""

import json
from pathlib import Path
from typing import Any

from .settings import AUX_LAYERS, DEPTHS, MASK_ID, PARD2_LAYERS, SHAPES, Run

WHAT = {
    "target": "A tiny Llama that writes Python: the target of the drafts beside it.",
    "draft": "An ordinary autoregressive draft model for `models/target`.",
    "pard": "A PARD draft for `models/target`: a plain Llama that drafts several "
    f"tokens in one pass from mask tokens (`pard_token` {MASK_ID}).",
    "pard2": "A PARD-2 draft for `models/target`: a PARD that is fed the target's "
    f"hidden states as well (`pard2_target_layers` {list(PARD2_LAYERS)}, "
    "`warp_model.bin`). It has the target's tokenizer. What it gains over "
    "`models/pard`, by more layers and by the states, is in `docs/drafters.md`.",
    "eagle3": "An EAGLE-3 head for `models/target`, in the format of speculators.",
    "peagle": "A P-EAGLE head for `models/target`, in the format of speculators: "
    "several tokens in one pass, from `mask_hidden` and mask token "
    f"{MASK_ID}.",
}
HOW = {
    "target": "Next-token cross entropy on the corpus.",
    "draft": "On text that the target wrote, to the target's distribution (half KL, "
    "half cross entropy with its greedy choice).",
    "pard": "On text that the target wrote, to the target's distribution, up to "
    f"{DEPTHS} tokens ahead, deeper ones sampled more thinly (COD).",
    "pard2": "The first layers and the embeddings are those of `models/pard`, frozen: "
    "the same file. Trained are the projection of the target's states and "
    f"{SHAPES['pard2'].layers - SHAPES['pard'].layers} more layers, on the same text; "
    "a token weighs as much as the target finds the text before it likely, from where "
    "masks begin.",
    "eagle3": "By speculators' own multi-step loss on text that the target wrote; it "
    f"reads the streams that enter layers {AUX_LAYERS}. The file holds no "
    "embeddings: vLLM shares the target's.",
    "peagle": f"By speculators' own COD loss, {DEPTHS} deep, on text that the target "
    f"wrote; it reads the streams that enter layers {AUX_LAYERS}.",
}
DATA = """The source text of CPython's standard library and its tests, as found on the
training machine (3.11), without the modules in `../held_out.json` and their
tests. No text of it is stored here; it is under the PSF licence."""


def write(run: Run) -> None:
    """Write every model's README.md."""
    measured = _read(run.out / "measurements.json")
    for name in SHAPES:
        folder = run.model_dir(name)
        record = _read(folder / "training.json")
        (folder / "README.md").write_text(card(name, record, measured))


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {}


def card(name: str, record: dict[str, Any], measured: dict[str, Any]) -> str:
    parts = [_front(name), f"# {name}\n\n{WHAT[name]} For tests and examples only.\n"]
    parts.append(f"## Data\n\n{DATA}\n")
    if record:
        parts.append(_training(name, record))
    if name in measured:
        parts.append(_acceptance(name, measured))
    return "\n".join(parts)


def _front(name: str) -> str:
    base = "" if name == "target" else "base_model: models/target\n"
    return (
        f"---\nlicense: apache-2.0\nlanguage: code\nlibrary_name: vllm\n{base}"
        f"tags:\n- speculative-decoding\n---\n"
    )


def _training(name: str, record: dict[str, Any]) -> str:
    shape = SHAPES[name]
    losses = record["losses"]
    shown = losses[:: max(1, len(losses) // 5)]
    shown += [] if losses[-1] in shown else [losses[-1]]
    table = "".join(f"| {step} | {loss:.3f} |\n" for step, loss in shown)
    held, before = record.get("held_out_loss"), record.get("before")
    first = (
        f"Before that, {before['steps']} steps of {before['sequences_per_step']} x "
        f"{before['sequence_tokens']} tokens as an ordinary draft model.\n\n"
        if before
        else ""
    )
    return (
        f"## Training\n\n{HOW[name]}\n\n{first}"
        f"{shape.layers} layers, {shape.hidden} wide, {record['parameters']:,} trained "
        f"parameters; {record['steps']} steps of {record['sequences_per_step']} x "
        f"{record['sequence_tokens']} tokens, AdamW, peak learning rate "
        f"{record['peak_learning_rate']}, {record['seconds']:.0f} s on one "
        f"{record['device']}.\n\n| step | loss |\n| --- | --- |\n{table}"
        + (f"\nLoss on held-out modules: {held} nats a token.\n" if held else "")
        + "\nMade by `python -m tools.tiny_models`.\n"
    )


def _acceptance(name: str, measured: dict[str, Any]) -> str:
    result = measured[name]
    rates = " ".join(f"{rate:.2f}" for rate in result["acceptance_by_position"])
    return (
        f"## Acceptance\n\nWith vLLM {result['vllm']}, K = "
        f"{measured['num_speculative_tokens']}, greedy, {measured['prompts']} prompts "
        f"of {measured['prompt_tokens']} tokens from held-out modules, up to "
        f"{measured['output_tokens']} tokens each: acceptance length "
        f"**{result['acceptance_length']:.2f}** (mean accepted tokens + 1); accepted "
        f"by position: {rates}. {result['outputs_equal']} of {measured['prompts']} "
        "outputs equal the target's alone.\n\n"
        "Measured by `python -m tools.tiny_models.measure`.\n"
    )
