# SPDX-License-Identifier: Apache-2.0
"""The pipeline is valid for Buildkite, names existing paths, and has every test."""

import json
import shlex
from importlib.resources import files
from importlib.util import find_spec

import pytest
import yaml
from jsonschema.validators import validator_for

from tests.conftest import ROOT

FOLDER = ROOT / ".buildkite"
FILES = [FOLDER / "pipeline.yaml", *sorted(FOLDER.glob("*/*.yaml"))]
STEPS = [
    step
    for file in FILES[1:]
    for group in yaml.safe_load(file.read_text())["steps"]
    for step in group["steps"]
]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_pipeline_matches_buildkite_schema(file):
    schema = json.loads(files("buildkite_sdk").joinpath("schema.json").read_text())
    validator_for(schema)(schema).validate(yaml.safe_load(file.read_text()))


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step["key"])
def test_paths_and_modules_of_steps_exist(step):
    for name in ("label", "key"):
        assert [s[name] for s in STEPS].count(step[name]) == 1
    for path in step.get("if_changed", [])[1:]:
        assert (ROOT / path.removesuffix("**")).exists()
        assert (ROOT / path.removesuffix("**")).is_dir() == path.endswith("/**")
    for command in step["commands"]:
        words = shlex.split(command)
        if words[0] == "pytest":
            assert all((ROOT / w).exists() for w in words if w.startswith("tests/"))
        if words[:2] == ["python", "-m"]:
            assert find_spec(words[2])


def test_each_test_is_in_one_cpu_step():
    steps = [s for s in STEPS if s["agents"]["queue"] == "cpu" and "if" not in s]
    named = [word for s in steps for c in s["commands"] for word in shlex.split(c)]
    folders = [f"{word}/" for word in named if word.startswith("tests/")]
    for path in (ROOT / "tests").rglob("test_*.py"):
        test = path.relative_to(ROOT).as_posix()
        assert sum(test.startswith(folder) for folder in folders) == 1, test
