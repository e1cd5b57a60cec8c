# SPDX-License-Identifier: Apache-2.0
"""The pipeline is valid for Buildkite, names existing paths, and has every test."""

import json
import shlex
from importlib.resources import files
from importlib.util import find_spec

import pytest
from jsonschema.validators import validator_for

from tools import ci
from tools.ci import ROOT, pipeline

STEPS = [step for group in ci.load_groups(ci.load_config()) for step in group["steps"]]


def keys(changed: list[str] | None, nightly: bool = False) -> set[str]:
    groups = pipeline(changed, nightly)["steps"]
    return {step["key"] for group in groups for step in group["steps"]}


@pytest.mark.parametrize("nightly", [False, True])
@pytest.mark.parametrize("changed", [None, ["docs/start.md"], []])
def test_pipeline_matches_buildkite_schema(changed, nightly):
    schema = json.loads(files("buildkite_sdk").joinpath("schema.json").read_text())
    validator_for(schema)(schema).validate(pipeline(changed, nightly))


@pytest.mark.parametrize(
    ("changed", "some", "none"),
    [
        (["csrc/tree_attention.cpp"], {"kernels", "e2e", "gpu-kernels"}, {"upstream"}),
        (["docs/start.md"], {"house", "lint"}, {"e2e", "config"}),
        (["base.toml"], {"e2e", "overlay", "house"}, set()),
        (["a/new/file.py"], {"e2e", "overlay", "house"}, set()),
        (["NOTICE"], {"lint"}, {"e2e", "overlay", "house"}),
    ],
)
def test_changed_files_select_steps(changed, some, none):
    found = keys(changed)
    assert some <= found and not none & found


def test_optional_steps_have_block_steps():
    optional = {step["key"] for step in STEPS if step.get("optional")}
    buttons = {f"block-{key}" for key in optional}
    assert optional and optional | buttons <= keys(None)
    assert not buttons & keys(None, nightly=True)


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step["key"])
def test_paths_and_modules_of_steps_exist(step):
    read = {*ci.OWN, ci.DEPENDENCIES, *ci.PASSED_ON}
    assert step.keys() <= read
    for name in ("label", "key"):
        assert [s[name] for s in STEPS].count(step[name]) == 1
    for path in step.get(ci.DEPENDENCIES, []):
        assert (ROOT / path).is_dir() == path.endswith("/") and (ROOT / path).exists()
    for command in step["commands"]:
        words = shlex.split(command)
        if words[0] == "pytest":
            assert all((ROOT / w).exists() for w in words if w.startswith("tests/"))
        if words[:2] == ["python", "-m"]:
            assert find_spec(words[2])


def test_each_test_is_in_one_cpu_step():
    steps = [s for s in STEPS if s["device"] == "cpu" and not s.get("optional")]
    named = [word for s in steps for c in s["commands"] for word in shlex.split(c)]
    folders = [f"{word}/" for word in named if word.startswith("tests/")]
    for path in (ROOT / "tests").rglob("test_*.py"):
        test = path.relative_to(ROOT).as_posix()
        assert sum(test.startswith(folder) for folder in folders) == 1, test
