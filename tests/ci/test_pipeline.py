# SPDX-License-Identifier: Apache-2.0
"""What Buildkite is given: valid by its own schema, and what the areas say."""

import json
import os
import shutil
import subprocess
from importlib.resources import files

import pytest
import yaml
from jsonschema.validators import validator_for

from tests.ci.fakes import AREA, pipelines, repository
from tools.ci.__main__ import main
from tools.ci.pipeline import pipeline_yaml
from tools.ci.select import select
from tools.ci.steps import ROOT, load


@pytest.fixture(scope="module")
def buildkite():
    """Buildkite's own schema."""
    schema = json.loads(files("buildkite_sdk").joinpath("schema.json").read_text())
    return validator_for(schema)(schema)


def steps_of(text: str) -> dict[str, dict]:
    groups = yaml.safe_load(text)["steps"]
    return {step["key"]: step for group in groups for step in group["steps"]}


def references(steps: dict[str, dict]) -> set[str]:
    return {key for step in steps.values() for key in step["depends_on"]}


def test_the_schema_refuses(buildkite):
    step = {"label": "A", "commands": ["make"], "timeout_in_minutes": "soon"}
    assert not buildkite.is_valid({"steps": [{"group": "A", "steps": [step]}]})


def test_bootstrap_is_valid(buildkite):
    text = (ROOT / ".buildkite/pipeline.yaml").read_text()
    assert buildkite.is_valid(yaml.safe_load(text))


@pytest.mark.parametrize("nightly", [False, True])
@pytest.mark.parametrize(
    "changed", [None, ["csrc/prepare_inputs.cpp"], ["docs/performance.md"]]
)
def test_this_repository(changed, nightly, buildkite):
    ours = load()
    text = pipeline_yaml(ours, select(ours, changed).steps, nightly)
    buildkite.validate(yaml.safe_load(text))
    steps = steps_of(text)
    assert references(steps) <= steps.keys()
    assert any("block" in step for step in steps.values()) == (
        not nightly and changed != ["docs/performance.md"]
    )


def test_a_step(tmp_path):
    ours = pipelines(tmp_path)
    assert steps_of(pipeline_yaml(ours, ours.steps, False))["two"] == {
        "label": "Two %N",
        "key": "two",
        "agents": {"queue": "small"},
        "commands": ["make env", "python -m tools.ci shard tests/two"],
        "depends_on": [],
        "timeout_in_minutes": 5,
        "parallelism": 2,
        "retry": {"automatic": [{"exit_status": -1, "limit": 2}]},
    }


def test_an_optional_step_waits_for_a_button(tmp_path):
    ours = pipelines(tmp_path)
    steps = steps_of(pipeline_yaml(ours, ours.steps, False))
    assert steps["block-gpu"] == {
        "block": "Run GPU",
        "key": "block-gpu",
        "depends_on": [],
    }
    assert steps["gpu"]["depends_on"] == ["one", "block-gpu"]
    assert steps["gpu"]["agents"] == {"queue": "big", "num_devices": "2"}
    steps = steps_of(pipeline_yaml(ours, ours.steps, True))
    assert "block-gpu" not in steps
    assert steps["gpu"]["depends_on"] == ["one"]


def test_a_step_may_have_its_own(tmp_path, buildkite):
    area = """\
        group: Area
        depends_on: [b]
        steps:
          - label: A
            key: a
            device: h200
            timeout_in_minutes: 1
            env: {NAME: value}
            soft_fail: [{exit_status: 3}]
            artifact_paths: ["build/*"]
            retry: {automatic: []}
            commands: ["echo $$NAME"]
          - {label: B, key: b, device: cpu, timeout_in_minutes: 1, depends_on: [],
             commands: [make]}
        """
    ours = pipelines(tmp_path, area)
    text = pipeline_yaml(ours, ours.steps, False)
    buildkite.validate(yaml.safe_load(text))
    step = steps_of(text)["a"]
    assert step["depends_on"] == ["b"]
    assert step["commands"] == ["echo $$NAME"]  # for the agent to turn into one
    assert step["env"] == {"NAME": "value"}
    assert step["soft_fail"] == [{"exit_status": 3}]
    assert step["retry"] == {"automatic": []}
    assert "*id" not in text and "&id" not in text


def test_generate(tmp_path, capsys):
    root = repository(tmp_path)
    output = tmp_path / "pipeline.yaml"
    flags = ["--root", str(root), "generate", "--changed", "other/a.py"]
    assert main(flags) == 0
    out, said = capsys.readouterr()
    assert said == "1 of 3 steps\n"
    assert steps_of(out).keys() == {"two"}
    assert main([*flags, "--output", str(output)]) == 0
    assert output.read_text() == out


def test_nothing_is_generated_from_what_is_wrong(tmp_path, capsys):
    root = repository(tmp_path)
    (root / "src/b.py").unlink()
    assert main(["--root", str(root), "generate", "--all"]) == 1
    out, said = capsys.readouterr()
    assert not out and said.startswith(f"{AREA}:15: Two %N: there is no src/b.py")


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"BUILDKITE_BRANCH": "main"}, {"one", "two", "gpu", "block-gpu"}),
        ({"BUILDKITE_BRANCH": "a", "NIGHTLY": "1"}, {"one", "two", "gpu"}),
        ({"BUILDKITE_BRANCH": "a"}, {"two"}),
    ],
)
def test_bootstrap(variables, expected, tmp_path):
    """The script of the first step, with an agent that keeps what it is given."""
    origin = repository(tmp_path / "origin")
    shutil.copy(ROOT / ".buildkite/bootstrap.sh", origin / ".buildkite")
    shutil.copytree(ROOT / "tools/ci", origin / "tools/ci")
    git = ["git", "-c", "user.name=A", "-c", "user.email=a@example.org"]
    for command in (["init", "-b", "main"], ["add", "."], ["commit", "-m", "Start"]):
        subprocess.run([*git, *command], cwd=origin, check=True, capture_output=True)
    clone = tmp_path / "clone"
    subprocess.run([*git, "clone", "-q", str(origin), str(clone)], check=True)
    (clone / "other/a.py").write_text("changed")
    agent = tmp_path / "bin/buildkite-agent"
    agent.parent.mkdir()
    agent.write_text(f'#!/bin/sh\necho "$1 $2"; cp "$3" {tmp_path}/uploaded\n')
    agent.chmod(0o755)
    here = os.path.dirname(shutil.which("python3", path=os.environ["PATH"]) or "")
    env = {**os.environ, "PATH": f"{agent.parent}:{here}:{os.environ['PATH']}"}
    done = subprocess.run(
        [clone / ".buildkite/bootstrap.sh"],
        env={**env, **variables},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "pipeline upload\n"
    assert steps_of((tmp_path / "uploaded").read_text()).keys() == expected
