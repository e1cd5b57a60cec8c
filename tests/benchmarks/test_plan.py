# SPDX-License-Identifier: Apache-2.0
"""Which engines run at the same time, and with which models."""

import json
from argparse import Namespace
from itertools import product
from pathlib import Path

import pytest

from benchmarks.spec_decode import plan
from benchmarks.spec_decode.flags import parse
from benchmarks.spec_decode.models import BLOCK, PARALLEL, SETS, modes_of, write_models
from benchmarks.spec_decode.results import OURS, EngineKey

SITES = [f"--site={name}={Path(__file__).parent}" for name in ("ours", "base")]
SHARING = (
    "--implementations ours base-v1 --modes draft pard --trace t0.5 "
    "--num-speculative-tokens 3 8 --draft-tree 0 15 "
)


def args_of(flags: str) -> Namespace:
    return parse([*SITES, *flags.split()])


def keys_of(flags: str) -> set[str]:
    (group,) = plan.plan_groups(args_of(flags), 99)
    assert len(group) == len(set(group))
    return {str(key) for key in group}


def test_which_side_runs_which_mode():
    found = keys_of("--num-speculative-tokens 3 7")
    assert len(found) == 3 + 2 * (3 + 2 + 1 + 3 + 2)
    assert not {"base-v2/pard/K7", "base-v1/pard2/K7"} & found
    found = keys_of("--shapes qwen3-8b --modes dflash dspark")
    assert {key.partition("/")[0] for key in found} == {OURS, "base-v2"}
    assert len(keys_of("--shapes mimo-7b --num-speculative-tokens 3")) == 3 + 3


def test_engines_besides_fixed_chains():
    flags = "--modes none draft pard --num-speculative-tokens 7 11 --trace t0.5 "
    more = keys_of(flags + "--auto 11 --draft-tree 8 15") - keys_of(flags)
    modes = product(("draft", "pard"), ("", "auto"))
    assert more == {f"ours/{mode}/K11tree15{auto}" for mode, auto in modes}


def test_auto_with_chains_and_with_trees():
    flags = "--modes pard --trace t0.5 --auto 8 --draft-tree 0 15 31 "
    found = keys_of(flags + "--num-speculative-tokens --implementations ours")
    assert found == {"ours/pard/K8auto", "ours/pard/K8tree31auto"}


@pytest.mark.parametrize("auto", ["", "--auto 8"])
def test_engine_that_chooses_is_shared_with_fixed_lengths(auto: str):
    args = args_of(SHARING + auto)
    (keys,) = plan.plan_groups(args, 99)
    shared = [key for key in keys if key.implementation == OURS]
    trees = ("", "tree15") if auto else ("tree15",)  # it is measured without, too
    assert {str(plan.engine_of(key, args)) for key in shared} == {
        f"ours/{mode}/K8{tree}auto" for mode, tree in product(("draft", "pard"), trees)
    }


@pytest.mark.parametrize("at_once", [1, 2, 3])
def test_each_engine_starts_once(at_once: int):
    """Regression: a shared one was started anew for each group of as many settings."""
    args = args_of(SHARING + "--auto 8")
    groups = plan.plan_groups(args, at_once)
    engines = [{plan.engine_of(key, args) for key in group} for group in groups]
    assert max(map(len, engines)) == at_once
    assert sum(map(len, engines)) == len(set().union(*engines))
    assert {str(key) for group in groups for key in group} == keys_of(
        SHARING + "--auto 8"
    )


@pytest.mark.parametrize("name", SETS)
def test_models_accept_arguments_of_every_mode(name: str, tmp_path: Path):
    from vllm import EngineArgs
    from vllm.config.drafter.files import read_checkpoint

    models = write_models(name, tmp_path)
    run = args_of('--engine-args {"gpu_memory_utilization":0.5}')
    run.models, run.on_cpu, run.max_model_len = models, False, 1024
    for mode in modes_of(name):
        key = EngineKey("ours", mode, 7 * (mode != "none"))
        engine = EngineArgs(**plan.llm_args(key, run))
        assert engine.gpu_memory_utilization == 0.5
        if (models / mode).is_dir():
            config = json.loads((models / mode / "config.json").read_text())
            drafter = read_checkpoint(config, models / mode)
            assert drafter.is_parallel == (mode in PARALLEL + BLOCK)
