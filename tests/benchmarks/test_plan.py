# SPDX-License-Identifier: Apache-2.0
"""Which engines run at the same time, and with which models."""

import json
from argparse import Namespace
from itertools import chain, product
from pathlib import Path

import pytest

from benchmarks.spec_decode.flags import parse
from benchmarks.spec_decode.models import (
    BLOCK,
    PARALLEL,
    SETS,
    modes_of,
    write_models,
)
from benchmarks.spec_decode.plan import (
    engine_of,
    llm_args,
    plan_groups,
)
from benchmarks.spec_decode.results import OURS, EngineKey

HERE = f"--site=ours={Path(__file__).parent}"


SITES = [HERE, HERE.replace("ours", "base")]


def args_for(models: Path, flags: str = "") -> Namespace:
    more = {"models": models, "on_cpu": False, "max_model_len": 1024}
    return Namespace(**vars(parse([*SITES, *flags.split()])) | more)


def planned(flags: str, at_once: int = 99) -> list[list[EngineKey]]:
    return plan_groups(parse([*SITES, *flags.split()]), at_once)


@pytest.mark.parametrize("at_once", [1, 2, 5])
def test_engines_are_unique(at_once: int):
    groups = planned("--num-speculative-tokens 3 7", at_once)
    keys = [key for group in groups for key in group]
    assert len(keys) == len(set(keys)) == 3 + 2 * (3 + 2 + 1 + 3 + 2)
    assert max(map(len, groups)) <= at_once
    assert EngineKey("base-v2", "pard", 7) not in keys
    assert EngineKey("base-v1", "pard2", 7) not in keys
    (group,) = planned("--shapes qwen3-8b --modes dflash dspark")
    assert {key.implementation for key in group} == {OURS, "base-v2"}
    (group,) = planned("--shapes mimo-7b --num-speculative-tokens 3")
    assert {key.mode for key in group} == {"none", "mtp"} and len(group) == 6


def test_engines_besides_fixed_chains():
    flags = "--modes none draft pard --num-speculative-tokens 7 11 --trace t0.5 "
    (group,) = planned(flags + "--auto 11 --draft-tree 8 15 --adaptive")
    (chains,) = planned(flags)
    assert {str(key) for key in group} - {str(key) for key in chains} == {
        *(
            f"ours/{mode}/K11tree15{auto}"
            for mode, auto in product(("draft", "pard"), ("", "auto", "autoadaptive"))
        ),
        "ours/draft/K11adaptive",
        "ours/pard/K11adaptive",
        "base-v2/draft/K11adaptive",
    }


def test_auto_with_chains_and_with_trees():
    flags = "--modes draft pard --trace t0.5 --auto 8 --draft-tree 0 15 31 --adaptive "
    (group,) = planned(flags + "--num-speculative-tokens --implementations ours")
    assert {str(key) for key in group} == {
        f"ours/{mode}/K8{tree}auto{adaptive}"
        for mode, tree in product(("draft", "pard"), ("", "tree31"))
        for adaptive in ("", "adaptive")
    }


SHARING = (
    "--implementations ours base-v1 --modes draft pard --trace t0.5 "
    "--num-speculative-tokens 3 8 --draft-tree 0 15 --share-engines "
)


@pytest.mark.parametrize("adaptive", ["", "adaptive"])
@pytest.mark.parametrize("auto", ["", "--auto 8"])
def test_engine_that_chooses_is_shared_with_fixed_lengths(auto: str, adaptive: str):
    flags = SHARING + auto + adaptive.replace("adaptive", " --adaptive")
    args = parse([*SITES, *flags.split()])
    keys = [key for group in plan_groups(args, 99) for key in group]
    engines = {str(engine_of(key, args)) for key in keys if key.implementation == OURS}
    trees = ("", "tree15") if auto else ("tree15",)  # it is measured without, too
    assert engines == {
        f"ours/{mode}/K8{tree}auto{adaptive}"
        for mode, tree in product(("draft", "pard"), trees)
    }


@pytest.mark.parametrize("at_once", [1, 2, 3])
def test_shared_engine_starts_once(at_once: int):
    """Regression: it was started anew for each group of as many settings."""
    args = parse([*SITES, *(SHARING + "--auto 8").split()])
    groups = plan_groups(args, at_once)
    engines = [{engine_of(key, args) for key in group} for group in groups]
    assert max(map(len, engines)) == at_once
    assert sum(map(len, engines)) == len(set().union(*engines))
    assert {*chain(*groups)} == {*chain(*plan_groups(args, 99))}


@pytest.mark.parametrize("name", SETS)
def test_models_accept_arguments_of_every_mode(name: str, tmp_path: Path):
    from vllm import EngineArgs
    from vllm.config.drafter.families import read_checkpoint

    models = write_models(name, tmp_path)
    run = args_for(models, '--engine-args {"gpu_memory_utilization":0.5}')
    for mode in modes_of(name):
        args = llm_args(EngineKey("ours", mode, 7 * (mode != "none")), run)
        assert EngineArgs(**args).gpu_memory_utilization == 0.5
        if (models / mode).is_dir():
            config = json.loads((models / mode / "config.json").read_text())
            drafter = read_checkpoint(config, models / mode)
            assert drafter.is_parallel == (mode in PARALLEL + BLOCK)
