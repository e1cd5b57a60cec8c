# SPDX-License-Identifier: Apache-2.0
"""The record of checkpoints that passed: it lists all, as they are detected now.

The docs' tables are made of it; `python -m tests.checkpoints.record` renews it.
"""

from pathlib import Path

import pytest

from tests.checkpoints.families import (
    PUBLISHED,
    TARGETS,
    Published,
    write,
    write_target,
)
from tests.checkpoints.record import detected, recorded
from tests.checkpoints.trained import NAMES, trained
from vllm.config.drafter.families import FAMILIES
from vllm.config.drafter.resolve import describe
from vllm.engine.arg_utils import EngineArgs

RECORD = recorded()


@pytest.fixture(scope="module")
def targets(models, tmp_path_factory) -> dict[str, Path]:
    folder, bundled = tmp_path_factory.mktemp("targets"), models / "target"
    made = {name: write_target(name, folder / name, bundled) for name in TARGETS}
    return made | {"bundled": bundled}


def found(made: Published, folder: Path, target: Path) -> dict[str, str]:
    spec = {"model": str(write(made, folder, target)), **made.settings}
    engine = EngineArgs(model=str(target), speculative_config=spec)
    found = engine.create_engine_config().speculative_config
    return detected(describe(found, found.drafter))


@pytest.mark.parametrize("name", PUBLISHED)
def test_published(name: str, targets, tmp_path):
    made = PUBLISHED[name]
    line = found(made, tmp_path / "drafter", targets[made.target])
    assert RECORD[name]["detected"] == line
    assert RECORD[name]["drafts_compared"] >= 20


@pytest.mark.parametrize("name", NAMES)
def test_trained(name: str, models, targets, tmp_path):
    made = trained(models)[name]
    assert RECORD[name]["detected"] == found(
        made, tmp_path / "drafter", targets["bundled"]
    )


def test_nothing_else_is_recorded(models):
    assert set(RECORD) == {*PUBLISHED, *NAMES}
    assert set(NAMES) == set(trained(models))


def test_every_family_has_trained_weights(models):
    assert {made.family for made in trained(models).values()} == {
        family.name for family in FAMILIES
    }
