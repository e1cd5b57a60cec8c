# SPDX-License-Identifier: Apache-2.0
"""Which engines to measure, which of them side by side, and how each is started."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.spec_decode.results import (
    BASE_V1,
    BASE_V2,
    MAIN_SHAPES,
    OURS,
    EngineKey,
)
from benchmarks.spec_decode.rounds import (
    conditional_rates,
    mean_length,
    minimum_variance_rates,
)
from benchmarks.spec_decode.shapes import PARALLEL, speculative_config
from benchmarks.spec_decode.traces import TEXTS

GIB = 1 << 30
MIN_MODEL_LEN = 1024
# Weights of the target and a drafter, activations, CUDA graphs and context; the KV
# cache comes on top.
ENGINE_GIB = 22
# Chance that drafts 1 to i are all accepted, the same for every mode: a step yields
# 2.5 tokens on average with K=3, 3.0 with 5, 3.5 with 7, 4.0 with 11.
CURVE = (0.7, 0.45, 0.35, 0.25, 0.25, 0.25, 0.25, 0.125, 0.125, 0.125, 0.125)
# The same mean lengths with as little chance in them as there can be, so that short
# rounds compare well; a drafter that is this even would be best at another K.
EQUAL = "equal"
# Drafts accepted by position as the curve has it, so that lengths of one drafter
# compare with each other.
BY_POSITION = "by-position"
ACCEPTANCES = (EQUAL, BY_POSITION)
# Recorded: see `traces.py`.
RECORDED = {f"recorded-{text}": text for text in TEXTS}
# Whose recording stands for a drafter that has none.
RECORDED_AS = {"pard2": "pard"}


def runs_mode(implementation: str, mode: str) -> bool:
    """The base has no PARD-2, and its Runner V2 refuses parallel drafting."""
    if mode == "pard2":
        return implementation == OURS
    return implementation != BASE_V2 or mode not in PARALLEL


def plan_groups(
    implementations: list[str],
    modes: list[str],
    num_tokens: list[int],
    at_once: int,
    auto: int | None = None,
    shapes: str = MAIN_SHAPES,
    trees: Sequence[int] = (),
    adaptive: bool = False,
) -> list[list[EngineKey]]:
    """Engines that run side by side: those of a mode and K stay together.

    A set that is larger than a group is cut.

    Args:
        auto: also an engine of ours per mode that chooses K itself, up to this.
        shapes: name of the set of models.
        trees: also an engine of ours per parallel mode with a draft tree of so many
            nodes, at the largest K.
        adaptive: also engines with adaptive verification, which Runner V1 lacks.
    """
    pairs = [("none", 0)] if "none" in modes else []
    pairs += [(mode, k) for k in num_tokens for mode in modes if mode != "none"]
    sets = [
        [
            *(
                EngineKey(name, mode, k, shapes=shapes)
                for name in implementations
                if runs_mode(name, mode)
            ),
            *(
                EngineKey(OURS, mode, k, shapes=shapes, tree=nodes)
                for nodes in trees
                if mode in PARALLEL and nodes >= k == max(num_tokens)
            ),
            *(
                EngineKey(name, mode, k, shapes=shapes, is_adaptive=True)
                for name in implementations
                if adaptive and k and name != BASE_V1 and runs_mode(name, mode)
            ),
        ]
        for mode, k in pairs
    ]
    if auto is not None:
        drafting = [mode for mode in modes if mode != "none"]
        most = max(trees, default=0)
        sets += [
            [EngineKey(OURS, mode, auto, True, shapes, most * (mode in PARALLEL))]
            for mode in drafting
        ]
    groups: list[list[EngineKey]] = []
    for whole in sets:
        for start in range(0, len(whole), at_once):
            part = whole[start : start + at_once]
            if groups and len(groups[-1]) + len(part) <= at_once:
                groups[-1].extend(part)
            else:
                groups.append(part)
    return groups


def shared_engines(
    keys: Sequence[EngineKey],
) -> dict[EngineKey, list[EngineKey]]:
    """Engines to start, each with the keys that it serves, its own among them.

    Those of ours that draft in one pass and differ only in how much share one, which
    can draft the most: an engine with a tree drafts chains too.
    """
    served: dict[Any, list[EngineKey]] = {}
    for key in keys:
        is_shared = key.implementation == OURS and key.mode in PARALLEL
        is_shared = is_shared and not (key.is_auto or key.is_adaptive)
        served.setdefault((key.mode, key.shapes) if is_shared else key, []).append(key)
    return {
        max(found, key=lambda key: (key.tree, key.num_tokens)): found
        for found in served.values()
    }


def recording(label: str, key: EngineKey) -> str | None:
    """Name of the recording that a label means for an engine; None without one."""
    if label not in RECORDED or key.mode == "none":
        return None
    return f"{RECORDED_AS.get(key.mode, key.mode)}-{RECORDED[label]}"


def curve(num_tokens: int) -> tuple[float, ...]:
    """The curve for so many drafts, its end drawn out where they are more."""
    return (CURVE + CURVE[-1:] * num_tokens)[:num_tokens]


def acceptance_rates(label: str, key: EngineKey) -> list[float] | None:
    """Chance that draft i is accepted given that those before it were, by label.

    None where the label says nothing of the mode and K, so there is no such point. The
    base does not choose its K, so at a K of its own it has one mean length only: points
    by position are ours alone.
    """
    rates = conditional_rates(curve(key.num_tokens))
    if label in RECORDED:
        return rates  # what is accepted of them is looked up
    if label == BY_POSITION:
        return rates if key.implementation == OURS and key.mode != "none" else None
    if key.is_auto:
        return None
    return minimum_variance_rates(mean_length(rates), key.num_tokens)


def engines_at_once(memory_bytes: int, kv_cache_gib: float) -> int:
    return max(1, int(memory_bytes / GIB / (ENGINE_GIB + kv_cache_gib)))


@dataclass(frozen=True)
class Setup:
    """What all engines of a run share.

    Attributes:
        sites: by "ours" and "base", a folder for PYTHONPATH or a Python interpreter.
        models: folder of each model's config.
        device: "cuda" or "cpu".
        kv_cache_gib: KV cache of each engine.
        engine_args: further arguments of LLM, over those chosen here.
        max_model_len: of the longest prompt and its output.
        is_replayed: whether acceptance is recorded.
    """

    sites: dict[str, str]
    models: dict[str, Path]
    device: str
    max_num_seqs: int
    kv_cache_gib: float
    engine_args: dict[str, Any]
    max_model_len: int = MIN_MODEL_LEN
    is_replayed: bool = False

    def job(self, key: EngineKey, num_drafts: Sequence[int] = ()) -> dict[str, Any]:
        """What a worker is started with.

        Args:
            num_drafts: how much the engine may be told to draft, tokens of a chain or
                nodes of a tree; empty: what its key says.
        """
        engine = self.llm_args(key)
        if num_drafts:
            # Any schedule that has them all: rounds put others in its place.
            ranges = [(i + 1, i + 1, k) for i, k in enumerate(num_drafts[:-1])]
            ranges.append((len(num_drafts), self.max_num_seqs, num_drafts[-1]))
            engine["speculative_config"] |= {
                "num_speculative_tokens_per_batch_size": ranges
            }
        return {
            "engine": engine,
            "device": self.device,
            "is_replayed": self.is_replayed and key.mode != "none",
        }

    def llm_args(self, key: EngineKey) -> dict[str, Any]:
        spec = speculative_config(
            key.mode, self.models, key.num_tokens, curve(key.num_tokens), key.tree
        )
        if key.is_auto:
            spec["num_speculative_tokens_per_batch_size"] = "auto"
        if key.is_adaptive:
            spec["enable_adaptive_verification"] = True
        args = {
            "model": str(self.models["target"]),
            "speculative_config": spec,
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "max_model_len": self.max_model_len,
            "max_num_seqs": self.max_num_seqs,
            "max_num_batched_tokens": 8192,
            # Long prompts are computed before a round, which then finds them.
            "enable_prefix_caching": self.max_model_len > MIN_MODEL_LEN,
            "disable_log_stats": False,
            "gpu_memory_utilization": 0.02,
            "kv_cache_memory_bytes": int(self.kv_cache_gib * GIB),
        }
        if self.device == "cpu":
            args |= {
                "dtype": "float32",
                "enforce_eager": True,
                "gpu_memory_utilization": 0.1,
            }
            if key.implementation == BASE_V1 and spec:
                # Runner V1 cannot draw acceptance on a CPU: it verifies drafts.
                del spec["rejection_sample_method"]
                del spec["synthetic_acceptance_rates"]
        return args | self.engine_args

    def command(
        self, key: EngineKey, lane: int = 0
    ) -> tuple[list[str], dict[str, str]]:
        """Interpreter with its arguments so far, and the environment.

        Args:
            lane: tells engines apart that start together and differ in K alone.
        """
        is_v2 = key.implementation != BASE_V1
        env = os.environ | {
            "VLLM_USE_V2_MODEL_RUNNER": str(int(is_v2)),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            # Engines that compile at the same time must not write the same files;
            # one of another K later reads them.
            "VLLM_CACHE_ROOT": str(
                cache_root() / f"{key.implementation}-{key.mode}-{key.shapes}-{lane}"
            ),
        }
        if self.device == "cpu":
            env |= {
                "TRITON_INTERPRET": str(int(is_v2)),
                "VLLM_CPU_KVCACHE_SPACE": "1",
                "OMP_NUM_THREADS": "1",
            }
        site = self.sites[OURS if key.implementation == OURS else "base"]
        return python_of(site, env)


def cache_root() -> Path:
    root = os.environ.get("VLLM_CACHE_ROOT", "~/.cache/vllm")
    return Path(root).expanduser() / "spec_decode_benchmarks"


def python_of(site: str, env: dict[str, str]) -> tuple[list[str], dict[str, str]]:
    """A site is an interpreter, or a folder for the python3 on the path."""
    if Path(site).is_file():
        return [site], env
    paths = [str(Path(site).resolve()), env.get("PYTHONPATH", "")]
    return ["python3"], env | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
