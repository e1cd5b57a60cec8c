# SPDX-License-Identifier: Apache-2.0
"""Every family with trained weights: its folder is all that is named, and it is good.

They are the bundled drafters, each in the files of a family.
"""

from typing import Any

import pytest

from tests.checkpoints.families import write
from tests.checkpoints.trained import NAMES, trained
from vllm.config.drafter.families import FAMILIES

from .oracle import same_as_alone
from .test_published_drafters import (
    acceptance,
    all_accepted,
    assert_is_detected,
    compare_drafts,
    drafts_for_itself,
)


@pytest.fixture(scope="module")
def prompts(make_prompt) -> list[list[int]]:
    return [make_prompt(length, 20) for length in (24, 33, 48, 60)]


@pytest.fixture
def engine_job(models, prompts):
    def job(spec: dict[str, Any] | None, **engine: Any) -> dict[str, Any]:
        given = {
            "model": str(models / "target"),
            "speculative_config": spec,
            "max_model_len": 128,
            "max_num_seqs": 4,
            "max_num_batched_tokens": 128,
        }
        requests = [{"prompt": prompt, "max_tokens": 32} for prompt in prompts]
        scenarios = {"greedy": requests}
        return {
            "record_drafts": True,
            "engine": given | engine,
            "scenarios": scenarios,
        }

    return job


def test_every_family_is_here(models):
    made = trained(models)
    assert made.keys() == {*NAMES}
    assert {each.family for each in made.values()} == {each.name for each in FAMILIES}


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_trained_drafters(name, models, target, prompts, engine_job, run_job, tmp_path):
    made = trained(models)[name]
    folder = write(made, tmp_path / name, models / "target")
    if name.endswith("speculators"):  # it names its target
        job = engine_job(None, model=str(folder))
    else:
        job = engine_job({"model": str(folder)})
    result = run_job(job)
    assert_is_detected(made, result, folder)
    found = result["scenarios"]["greedy"]
    same_as_alone(target, prompts, found["tokens"])
    assert compare_drafts(made, found, prompts, folder, target, every=3) > 5
    assert acceptance(found)[0] > 0.5


def test_the_target_drafts_for_itself(models, target, prompts, engine_job, run_job):
    """It takes every draft, of prompts in chunks and in batches too."""
    spec = drafts_for_itself(models / "target", 5)
    job = engine_job(spec, max_num_batched_tokens=40, max_num_seqs=3)
    all_accepted(run_job(job), prompts, target)
