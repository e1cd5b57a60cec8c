# SPDX-License-Identifier: Apache-2.0
"""Draws outputs with every kind of drafter and counts them against exact chances.

The target has a vocabulary so small that each output of three tokens has its own count.
Its exact distribution comes from its logits after every possible beginning. Each mode
drafts greedily and by chance, verified token by token and as a block, at several
temperatures and with top-p, by seeds of the requests, and under a grammar. An
acceptance rule that takes any draft must be found out by the same test. A drafter that
is seldom right would prove little, so its acceptance length is judged too.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from itertools import product
from pathlib import Path
from typing import Any

import torch

from benchmarks.spec_decode import results as files
from benchmarks.spec_decode.jobs import engine_memory, run_jobs
from benchmarks.spec_decode.lossless.chi_square import p_value, sequence_chances
from benchmarks.spec_decode.lossless.models import (
    MODES,
    VOCAB,
    WORDS,
    write_models,
)
from benchmarks.spec_decode.lossless.table import WRONG

ENGINE = ["-m", "benchmarks.spec_decode.lossless.engine"]
LENGTH = 3
NUM_DRAFTS = 3
# All that may be known when a token is drawn.
KNOWN = [k for n in range(LENGTH) for k in product(range(VOCAB), repeat=n)]
# So that of all tests together one in some hundred runs would fail by chance.
SIGNIFICANCE = 1e-4
# What drafters reach, up to this temperature.
LEAST_ACCEPTANCE_LENGTH, WARMEST = 1.2, 1.0
SETTINGS: dict[str, dict[str, Any]] = {
    **{f"T{t}": {"temperature": t, "top_p": 1.0} for t in (0.3, 0.7, 1.0, 1.5)},
    "T1.0/top-p 0.7": {"temperature": 1.0, "top_p": 0.7},
    "T1.0/seeded": {"temperature": 1.0, "top_p": 1.0, "seeded": True},
    # The tokens for each place. Half of what drafters draw behind the first is none of
    # them, and of the rest nearly all is token 4.
    "T1.0/grammar": {
        "temperature": 1.0,
        "top_p": 1.0,
        "grammar": ((4,), (1, 4), (1, 4)),
        "logit_bias": {4: -1.0},
    },
}
METHODS = {
    "greedy": {"draft_sample_method": "greedy"},
    "probabilistic": {"draft_sample_method": "probabilistic"},
    "block": {
        "draft_sample_method": "probabilistic",
        "rejection_sample_method": "block",
    },
}
# One that drafts token by token, one that drafts in parallel, and a head.
WRONG_MODES = ("draft", "pard", "eagle3")
WRONG_RULE = {
    "rejection_sample_method": "synthetic",
    "synthetic_acceptance_rates": [1.0] * NUM_DRAFTS,
}


def speculative_config(
    models: dict[str, Path], mode: str, method: str, **more: Any
) -> dict[str, Any]:
    return {
        "model": str(models[mode]),
        "method": "eagle3" if "eagle" in mode else "draft_model",
        "num_speculative_tokens": NUM_DRAFTS,
        **METHODS[method],
        **more,
    }


def plan(
    models: dict[str, Path], args: argparse.Namespace
) -> dict[str, dict[str, Any] | None]:
    """The engines by name: the target alone, each drafter, and the wrong rule."""
    modes = args.modes
    engines: dict[str, dict[str, Any] | None] = {"target": None} if args.alone else {}
    for mode, method in product(modes, args.methods):
        engines[f"{mode}/{method}"] = speculative_config(models, mode, method)
    for mode in [mode for mode in WRONG_MODES if mode in modes] or modes[:1]:
        wrong = speculative_config(models, mode, "greedy", **WRONG_RULE)
        engines[f"{WRONG}{mode}"] = wrong
    return engines


def run_all(
    engines: dict[str, dict[str, Any] | None], folder: Path, args: argparse.Namespace
) -> dict[str, dict[str, Any]]:
    """Results by name."""
    jobs = {name: make_job(args, spec, folder) for name, spec in engines.items()}
    # A prompt's last token is always the target's own, so any of them knows.
    next(iter(jobs.values()))["known"] = [list(k) for k in KNOWN]
    return run_jobs(ENGINE, jobs, args.device, args.engines_at_once)


def make_job(
    args: argparse.Namespace, spec: dict[str, Any] | None, folder: Path
) -> dict[str, Any]:
    engine = {"dtype": args.dtype, **engine_memory(args.device)}
    return {
        "target": str(folder / "target"),
        "speculative_config": spec,
        "max_num_seqs": args.max_num_seqs,
        "vocab": VOCAB,
        "length": LENGTH,
        "samples": args.samples,
        "settings": {name: for_engine(SETTINGS[name]) for name in args.settings},
        "known": [],
        "engine": engine | args.engine_args,
    }


def for_engine(setting: dict[str, Any]) -> dict[str, Any]:
    """With a grammar as a regular expression."""
    if "grammar" not in setting:
        return setting
    words = ("".join(WORDS[token] for token in place) for place in setting["grammar"])
    return setting | {"regex": "".join(f"[{place}]" for place in words)}


def as_asked(
    known: tuple[int, ...], logprobs: torch.Tensor, setting: dict[str, Any]
) -> torch.Tensor:
    """[V] of the target after `known`, as bias and grammar of a setting leave them."""
    asked = logprobs.clone()
    for token, bias in setting.get("logit_bias", {}).items():
        asked[token] += bias
    if "grammar" in setting:
        banned = set(range(VOCAB)) - set(setting["grammar"][len(known)])
        asked[list(banned)] = -torch.inf
    return asked


def judge(results: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The p-value and acceptance length of each engine and setting."""
    first = next(result for result in results.values() if "logprobs" in result)
    found = first["logprobs"]
    logprobs = {k: torch.tensor(row) for k, row in zip(KNOWN, found, strict=True)}
    rows = {}
    for label in first["draws"]:
        setting = SETTINGS[label]
        temperature, top_p = setting["temperature"], setting["top_p"]
        asked = {k: as_asked(k, row, setting) for k, row in logprobs.items()}
        chances = sequence_chances(asked, LENGTH, temperature, top_p)
        for name, result in results.items():
            drawn = result["draws"][label]
            rows[f"{name}/{label}"] = {
                "samples": len(drawn["tokens"]),
                "p_value": p_value(map(tuple, drawn["tokens"]), chances),
                "acceptance_length": drawn["acceptance_length"],
                "is_judged": temperature <= WARMEST and "grammar" not in setting,
            }
    return rows


def failures(rows: dict[str, dict[str, Any]]) -> list[str]:
    """What is not as it should be, in words; nothing, if all is well."""
    found = []
    for name, row in rows.items():
        is_target = row["p_value"] >= SIGNIFICANCE
        if name.startswith(WRONG):
            found += [f"{name} is not found out"] if is_target else []
            continue
        found += [] if is_target else [f"{name} is not the target's distribution"]
        length = row["acceptance_length"]
        is_judged = length is not None and row["is_judged"]
        if is_judged and length < LEAST_ACCEPTANCE_LENGTH:
            found.append(f"{name} has acceptance length {length:.2f}")
    return found


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.spec_decode.lossless", description=__doc__
    )
    add = parser.add_argument
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add("--dtype", default="float32")
    add("--samples", type=int, default=20000, help="outputs for each setting")
    add("--modes", nargs="+", choices=MODES, default=list(MODES))
    add("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    add("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    add(
        "--alone",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="count outputs of the target alone too",
    )
    add("--max-num-seqs", type=int, default=256)
    add("--engines-at-once", type=int, default=5)
    add("--engine-args", type=json.loads, default={}, help="more of LLM, as JSON")
    add("--output", type=Path)
    return parser.parse_args(arguments)


def main() -> None:
    args = parse()
    from benchmarks.spec_decode.engine import probe_device

    device = probe_device(sys.executable, dict(os.environ))
    begin = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        engines = plan(write_models(folder), args)
        rows = judge(run_all(engines, folder, args))
    run = {
        "command": files.command_line("lossless"),
        "device": device,
        "significance": SIGNIFICANCE,
    }
    path = args.output or files.RESULTS / files.slug(device["name"]) / "lossless.json"
    files.save(path, files.of_run(begin, run, "measurements", rows))
    for label, row in rows.items():
        length = row["acceptance_length"]
        drafted = "" if length is None else f", acceptance length {length:.2f}"
        print(f"{label}: p = {row['p_value']:.4f}{drafted}")
    if wrong := failures(rows):
        sys.exit("\n".join(["Not as it should be:", *wrong]))


if __name__ == "__main__":
    main()
