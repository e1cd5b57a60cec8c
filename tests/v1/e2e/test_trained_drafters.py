# SPDX-License-Identifier: Apache-2.0
"""Every family with trained weights: its folder is all that is named, and it is good.

They are the bundled drafters, each in the files of a family.
"""

from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints.families import write
from tests.checkpoints.record import acceptance, detected, note
from tests.checkpoints.trained import NAMES, trained

from .conftest import ENGINE
from .head_oracle import load_model
from .test_published_drafters import (
    all_accepted,
    assert_is_detected,
    compare_drafts,
    run_engines,
    same_as_alone,
)

MAX_TOKENS = 32
GROUPS = [NAMES[start::2] for start in range(2)]


@pytest.fixture(scope="module")
def prompts(make_prompt) -> list[list[int]]:
    return [make_prompt(length, 20) for length in (24, 33, 48, 60)]


@pytest.fixture
def engine_job(models, prompts):
    def job(speculative_config, **engine):
        return {
            "async_scheduling": False,
            "idle_every": 0,
            "record_drafts": True,
            "record_graphs": False,
            "engine": {
                **ENGINE,
                "model": str(models / "target"),
                "speculative_config": speculative_config,
                "max_model_len": 128,
                "max_num_seqs": 4,
                "max_num_batched_tokens": 128,
                **engine,
            },
            "scenarios": {
                "greedy": [
                    {"prompt": prompt, "max_tokens": MAX_TOKENS} for prompt in prompts
                ]
            },
        }

    return job


@pytest.mark.parametrize("names", GROUPS, ids="+".join)
def test_trained_drafters(names, models, prompts, engine_job, engine_env, tmp_path):
    made = {name: trained(models)[name] for name in names}
    folders = {
        name: write(drafter, tmp_path / name, models / "target")
        for name, drafter in made.items()
    }
    jobs = {name: job_of(name, folders[name], engine_job) for name in names}
    results = run_engines(jobs, engine_env, tmp_path)
    target = load_model(models / "target")
    for name, result in results.items():
        assert_is_detected(made[name], result, folders[name])
        found = result["scenarios"]["greedy"]
        same_as_alone(target, prompts, found["tokens"])
        compared = compare_drafts(
            made[name], found, prompts, folders[name], target, every=3
        )
        rates = acceptance(found["counters"])
        assert rates["acceptance_by_position"][0] > 0.5
        note(
            name,
            weights="trained",
            detected=detected(result["lines"][0]),
            drafts_compared=compared,
            **rates,
        )


def job_of(name: str, folder: Path, engine_job) -> dict[str, Any]:
    """A checkpoint of speculators is served alone: it names its target."""
    if name.endswith("speculators"):
        return engine_job(None, model=str(folder))
    return engine_job({"model": str(folder)})


def test_the_target_drafts_for_itself(
    models, prompts, engine_job, engine_env, tmp_path
):
    """It takes every draft, of prompts in chunks and in batches too."""
    folder = str(models / "target")
    spec = {"model": folder, "method": "draft_model", "num_speculative_tokens": 5}
    job = engine_job(spec, max_num_batched_tokens=40, max_num_seqs=3)
    result = run_engines({"own": job}, engine_env, tmp_path)["own"]
    all_accepted(result, prompts, load_model(models / "target"))
