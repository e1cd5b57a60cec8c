# SPDX-License-Identifier: Apache-2.0
"""Which engines to measure, which of them together, and how each is started."""

import os
from argparse import Namespace
from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from itertools import chain, islice, product
from pathlib import Path
from typing import Any

from benchmarks.spec_decode.models import BLOCK, MODES, PARALLEL
from benchmarks.spec_decode.results import BASE_V1, BASE_V2, OURS, EngineKey
from benchmarks.spec_decode.traces import equal_length

GIB = 1 << 30
MIN_MODEL_LEN = 1024
# Weights of the target and a drafter, activations, CUDA graphs and CUDA context,
# without the KV cache.
ENGINE_GIB = 22


def runs_mode(implementation: str, mode: str) -> bool:
    """False for vLLM with PARD-2, for its Runner V2 with parallel drafting, and for its
    Runner V1 with the DFlash family, of which it has one only, and slower."""
    lacking = {OURS: (), BASE_V1: ("pard2", *BLOCK), BASE_V2: PARALLEL}
    return mode not in lacking[implementation]


def keys_of(args: Namespace) -> Iterator[EngineKey]:
    """All engines to measure, those of a mode and K one after the other.

    Only this tree has draft trees, measured with the largest K only. "auto" is measured
    with up to the largest --draft-tree, and also without trees if 0 was given.
    """
    key_of, trees = partial(EngineKey, shapes=args.shapes), args.draft_tree
    drafting = [mode for mode in args.modes if mode != "none"]
    if "none" in args.modes:
        yield from (key_of(side, "none", 0) for side in args.implementations)
    for k, mode in product(args.num_speculative_tokens, drafting):
        sides = [side for side in args.implementations if runs_mode(side, mode)]
        yield from (key_of(side, mode, k) for side in sides)
        if k == max(args.num_speculative_tokens):
            yield from (key_of(OURS, mode, k, tree=n) for n in trees if n >= k)
    if args.auto is not None:
        sizes = sorted({max(trees, default=0), *({0} & {*trees})})
        for mode, nodes in product(drafting, sizes):
            yield key_of(OURS, mode, args.auto, is_auto=True, tree=nodes)


def plan_groups(args: Namespace, at_once: int) -> list[list[EngineKey]]:
    """Groups of keys whose engines, at most `at_once`, are loaded together; those to
    compare follow each other.

    Args:
        args: the flags, see `flags.py`.
    """
    keys: dict[EngineKey, list[EngineKey]] = defaultdict(list)
    for key in keys_of(args):
        keys[engine_of(key, args)].append(key)
    engines = iter(keys.values())
    groups = iter(lambda: [*islice(engines, at_once)], [])
    return [[*chain.from_iterable(group)] for group in groups]


def engine_of(key: EngineKey, args: Namespace) -> EngineKey:
    """The engine that a point is measured on: its own, or where acceptance is replayed
    one of ours that chooses how much to draft, on which that can also be set."""
    depth = args.auto or max(args.num_speculative_tokens, default=0)
    drafts = key.implementation == OURS and key.mode != "none"
    if not args.trace or not drafts or key.num_tokens > depth:
        return key
    nodes = key.tree if key.is_auto else max(args.draft_tree, default=0)
    return EngineKey(OURS, key.mode, depth, True, key.shapes, nodes)


def python_of(site: str, **env: str) -> tuple[list[str], dict[str, str]]:
    """Command and environment of a site: an interpreter, or a folder of packages for
    the python3 on the path."""
    env = dict(os.environ) | env
    if Path(site).is_file():
        return [site], env
    paths = [str(Path(site).resolve()), env.get("PYTHONPATH", "")]
    return ["python3"], env | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


def python_for(
    key: EngineKey, args: Namespace, lane: int
) -> tuple[list[str], dict[str, str]]:
    """Command and environment of an engine.

    Args:
        lane: distinguishes engines that start together and differ only in setting.
    """
    # Engines that compile at the same time must not write the same files. Engines with
    # another K that start later reuse them.
    root = Path(os.environ.get("VLLM_CACHE_ROOT", "~/.cache/vllm")).expanduser()
    cache = f"{key.implementation}-{key.mode}-{key.shapes}-{lane}"
    env = {
        "VLLM_USE_V2_MODEL_RUNNER": str(int(key.implementation != BASE_V1)),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_CACHE_ROOT": str(root / "spec_decode_benchmarks" / cache),
    }
    if args.on_cpu:
        env["VLLM_CPU_KVCACHE_SPACE"] = "1"
    return python_of(args.site[OURS if key.implementation == OURS else "base"], **env)


def llm_args(key: EngineKey, args: Namespace) -> dict[str, Any]:
    """Arguments of LLM.

    Args:
        args: the flags, and `models`, the folder of the set of models, `on_cpu`, and
            `max_model_len`, tokens of the longest prompt and its output.
    """
    engine = {
        "model": str(args.models / "target"),
        "speculative_config": speculative_config(key, args),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "max_model_len": args.max_model_len,
        "max_num_seqs": args.max_num_seqs,
        "max_num_batched_tokens": 8192,
        # Long prompts are computed before a round, which then hits the cache.
        "enable_prefix_caching": args.max_model_len > MIN_MODEL_LEN,
        "disable_log_stats": False,
        "gpu_memory_utilization": 0.1 if args.on_cpu else 0.02,
        "kv_cache_memory_bytes": int(args.kv_cache_gib * GIB),
    }
    if args.on_cpu:
        engine |= {"dtype": "float32", "compilation_config": {"mode": 0}}
    return engine | args.engine_args


def speculative_config(key: EngineKey, args: Namespace) -> dict[str, Any] | None:
    if key.mode == "none":
        return None
    config = MODES[key.mode] | {"num_speculative_tokens": key.num_tokens}
    if (drafter := args.models / key.mode).is_dir():  # else a part of the target
        config["model"] = str(drafter)
    if key.tree:
        config["draft_tree"] = key.tree  # acceptance is replayed
    elif not args.on_cpu or key.implementation != BASE_V1:
        # So that every engine accepts the same. Runner V1 does not support it on a CPU,
        # where it can only replay recordings.
        config["rejection_sample_method"] = "synthetic"
        config["synthetic_acceptance_length"] = equal_length(key.num_tokens)
    if key.is_auto:
        config["num_speculative_tokens_per_batch_size"] = "auto"
        # A part of "auto" by default: it goes by the confidence of random weights.
        config["enable_adaptive_verification"] = False
    return config | (args.spec_args if key.implementation == OURS else {})
