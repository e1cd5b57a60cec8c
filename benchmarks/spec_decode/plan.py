# SPDX-License-Identifier: Apache-2.0
"""Which engines to measure, which of them together, and how each is started."""

import os
from argparse import Namespace
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.spec_decode.models import MODES, PARALLEL
from benchmarks.spec_decode.results import BASE_V1, BASE_V2, OURS, EngineKey
from benchmarks.spec_decode.traces import equal_length

GIB = 1 << 30
MIN_MODEL_LEN = 1024
# Weights of the target and a drafter, activations, CUDA graphs and CUDA context,
# without the KV cache.
ENGINE_GIB = 22


def runs_mode(implementation: str, mode: str) -> bool:
    """False for vLLM with PARD-2, and for its Runner V2 with parallel drafting."""
    if mode == "pard2":
        return implementation == OURS
    return implementation != BASE_V2 or mode not in PARALLEL


def peers(args: Namespace, mode: str, k: int) -> list[EngineKey]:
    """The engines of a mode and K, which are measured together.

    Only this tree has draft trees and fp8 drafters, and Runner V1 has no adaptive
    verification. Trees and adaptive verification are measured with the largest K only.
    """
    sides = [name for name in args.implementations if runs_mode(name, mode)]
    keys = [EngineKey(name, mode, k, shapes=args.shapes) for name in sides]
    here = EngineKey(OURS, mode, k, shapes=args.shapes)
    more = [here._replace(is_fp8=True)] if args.fp8 and OURS in sides else []
    if k == max(args.num_speculative_tokens):
        more += [here._replace(tree=nodes) for nodes in args.draft_tree if nodes >= k]
        if args.adaptive:
            able = [key for key in keys if key.implementation != BASE_V1]
            more += [key._replace(is_adaptive=True) for key in able]
    return keys + more


def auto_engines(args: Namespace, mode: str) -> list[EngineKey]:
    """The engines that choose how much to draft ("auto").

    With up to the largest --draft-tree, and also without trees if 0 was given; each of
    them also with adaptive verification if --adaptive is set.
    """
    sizes = sorted({max(args.draft_tree, default=0), *({0} & {*args.draft_tree})})
    return [
        EngineKey(OURS, mode, args.auto, True, args.shapes, nodes, is_adaptive)
        for nodes in sizes
        for is_adaptive in (False, True)[: 1 + args.adaptive]
    ]


def plan_groups(args: Namespace, at_once: int) -> list[list[EngineKey]]:
    """Groups of keys whose engines, at most `at_once`, are loaded together; peers share
    a group if they fit.

    Args:
        args: the flags of `side_by_side.py`.
    """
    drafting, sets = [mode for mode in args.modes if mode != "none"], []
    if "none" in args.modes:
        none = EngineKey(OURS, "none", 0, shapes=args.shapes)
        sets.append([none._replace(implementation=i) for i in args.implementations])
    sets += [
        peers(args, mode, k) for k in args.num_speculative_tokens for mode in drafting
    ]
    if args.auto is not None:
        sets += [auto_engines(args, mode) for mode in drafting]
    keys_of: dict[EngineKey, list[EngineKey]] = defaultdict(list)
    groups: list[list[EngineKey]] = [[]]
    for whole in sets:
        new = dict.fromkeys(engine_of(key, args) for key in whole)
        new = [engine for engine in new if engine not in keys_of]
        for key in whole:
            keys_of[engine_of(key, args)].append(key)
        for begin in range(0, len(new), at_once):
            part = new[begin : begin + at_once]
            if len(groups[-1]) + len(part) > at_once:
                groups.append([])
            groups[-1] += part
    return [[key for engine in group for key in keys_of[engine]] for group in groups]


def is_shared(key: EngineKey, args: Namespace) -> bool:
    """Whether a shared engine serves this key, and is told how much to draft.

    An engine of this tree that chooses how much to draft can also be told it, and to
    verify all its drafts. Without one, this works for modes that draft in one pass; an
    engine with trees can also draft chains.
    """
    if not args.share_engines or key.implementation != OURS or key.mode == "none":
        return False
    if key.is_auto:
        return True
    if args.auto is not None:
        return not key.is_fp8 and key.num_tokens <= args.auto
    return key.mode in PARALLEL and not key.is_fp8 and not key.is_adaptive


def engine_of(key: EngineKey, args: Namespace) -> EngineKey:
    """The engine that a point is measured on: its own, or the shared one."""
    if not is_shared(key, args):
        return key
    if key.is_auto:
        return key._replace(is_adaptive=args.adaptive)
    nodes = max(args.draft_tree, default=0)
    if args.auto is None:
        return key._replace(num_tokens=max(args.num_speculative_tokens), tree=nodes)
    return EngineKey(OURS, key.mode, args.auto, True, key.shapes, nodes, args.adaptive)


def any_schedule(args: Namespace) -> list[tuple[int, int, int]]:
    """A schedule with all lengths of a shared engine; rounds replace it."""
    lengths = {*args.num_speculative_tokens, *args.draft_tree} - {0}
    lengths = sorted(lengths, reverse=True)
    ranges = [(i + 1, i + 1, n) for i, n in enumerate(lengths[:-1])]
    return [*ranges, (len(lengths), args.max_num_seqs, lengths[-1])]


def python_of(
    site: str, env: dict[str, str] | None = None
) -> tuple[list[str], dict[str, str]]:
    """Command and environment of a site: an interpreter, or a folder of packages for
    the python3 on the path."""
    env = dict(os.environ) | (env or {})
    if Path(site).is_file():
        return [site], env
    paths = [str(Path(site).resolve()), env.get("PYTHONPATH", "")]
    return ["python3"], env | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


@dataclass(frozen=True)
class Setup:
    """What all engines of a run share.

    Attributes:
        sites: by "ours" and "base", a folder for PYTHONPATH or a Python interpreter.
        models: folder of the set of models.
        engine_args: further arguments of LLM, which override those chosen here.
        max_model_len: tokens of the longest prompt and its output.
        spec_args: further keys of the speculative config, for engines of this tree.
    """

    sites: dict[str, str]
    models: Path
    on_cpu: bool
    max_num_seqs: int
    kv_cache_gib: float
    engine_args: dict[str, Any]
    max_model_len: int = MIN_MODEL_LEN
    spec_args: dict[str, Any] = field(default_factory=dict)

    def llm_args(self, key: EngineKey) -> dict[str, Any]:
        args = {
            "model": str(self.models / "target"),
            "speculative_config": self.speculative_config(key),
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "max_model_len": self.max_model_len,
            "max_num_seqs": self.max_num_seqs,
            "max_num_batched_tokens": 8192,
            # Long prompts are computed before a round, which then hits the cache.
            "enable_prefix_caching": self.max_model_len > MIN_MODEL_LEN,
            "disable_log_stats": False,
            "gpu_memory_utilization": 0.1 if self.on_cpu else 0.02,
            "kv_cache_memory_bytes": int(self.kv_cache_gib * GIB),
        }
        if self.on_cpu:
            args |= {"dtype": "float32", "compilation_config": {"mode": 0}}
        return args | self.engine_args

    def speculative_config(self, key: EngineKey) -> dict[str, Any] | None:
        if key.mode == "none":
            return None
        config: dict[str, Any] = {
            **MODES[key.mode],
            "model": str(self.models / key.mode),
            "num_speculative_tokens": key.num_tokens,
        }
        if key.tree:
            config["draft_tree"] = key.tree  # acceptance is replayed
        elif not self.on_cpu or key.implementation != BASE_V1:
            # So that every engine accepts the same. Runner V1 does not support it on a
            # CPU, where it can only replay recordings.
            config["rejection_sample_method"] = "synthetic"
            config["synthetic_acceptance_length"] = equal_length(key.num_tokens)
        if key.is_auto:
            config["num_speculative_tokens_per_batch_size"] = "auto"
        if key.is_auto or key.is_adaptive:  # a part of "auto" by default
            config["enable_adaptive_verification"] = key.is_adaptive
        if key.is_fp8:
            config["quantization"] = "fp8_per_channel"
            config["draft_lm_head_quantization"] = "fp8"
        return config | (self.spec_args if key.implementation == OURS else {})

    def command(
        self, key: EngineKey, lane: int = 0
    ) -> tuple[list[str], dict[str, str]]:
        """The interpreter's command line, and its environment.

        Args:
            lane: distinguishes engines that start together and differ only in setting.
        """
        is_v2 = key.implementation != BASE_V1
        # Engines that compile at the same time must not write the same files. Engines
        # with another K that start later reuse them.
        root = os.environ.get("VLLM_CACHE_ROOT", "~/.cache/vllm")
        cache = f"{key.implementation}-{key.mode}-{key.shapes}-{lane}"
        env = {
            "VLLM_USE_V2_MODEL_RUNNER": str(int(is_v2)),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_CACHE_ROOT": str(
                Path(root).expanduser() / "spec_decode_benchmarks" / cache
            ),
        }
        if self.on_cpu:
            env["VLLM_CPU_KVCACHE_SPACE"] = "1"
        site = self.sites[OURS if key.implementation == OURS else "base"]
        return python_of(site, env)
