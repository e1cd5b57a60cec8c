# SPDX-License-Identifier: Apache-2.0
"""Broken files: each error is one line that names the file, the line and the remedy."""

import pytest

from tests.ci.fakes import AREA, CONFIG, one_step, repository, write
from tools.ci.__main__ import main
from tools.ci.documents import PipelineError
from tools.ci.steps import load

NO_STEPS = "group: Area\n"
BROKEN = {
    "no YAML": ("group: [Area\nsteps:\n", "2: expected ',' or ']'"),
    "a tab": ("group: Area\n\tsteps: []\n", "2: found character '\\t'"),
    "unknown anchor": ("group: Area\nsteps: *them\n", "2: found undefined alias"),
    "a control character": ("group: Area\nsteps: \x01\n", "2: special characters"),
    "two documents": ("group: A\n---\ngroup: B\n", "2: but found another document"),
    "empty": ("", "1: the file must be object, is null"),
    "a list": ("- group: Area\n", "1: the file must be object, is "),
    "a key twice": ("group: A\nsteps: []\ngroup: B\n", "3: `group` is given twice"),
    "no steps": (NO_STEPS, "1: `steps` is missing"),
    "empty steps": (NO_STEPS + "steps: []\n", "2: `steps`: [] should be non-empty"),
    "unknown key": (one_step() + "step: 1\n", "10: unknown key `step`, did you mean"),
    "far key": (NO_STEPS + "zzz: 1\nsteps: []\n", "2: unknown key `zzz`, use group, "),
    "misspelt": (one_step(comands="[x]"), "10: unknown key `comands`, did you mean"),
    "missing": (one_step(device=""), "4: `device` is missing"),
    "no number": (
        one_step(timeout_in_minutes="soon"),
        '7: `timeout_in_minutes` must be integer, is "soon"',
    ),
    "too long": (one_step(timeout_in_minutes="999"), "7: `timeout_in_minutes`: 999 is"),
    "no list": (one_step(commands="make"), '9: `commands` must be array, is "make"'),
    "no text": (
        one_step(commands="\n      - make\n      - 3"),
        "11: `1` must be string, is 3",
    ),
    "bad key": (one_step(key="One!"), "5: `key`: 'One!' does not match"),
    "like an id": (
        one_step(key="0190046e-e199-453b-a302-a21a4d649d31"),
        "5: `key`: ",
    ),
    "no text in env": (one_step(env="{A: 1}"), "10: `A` must be string, is 1"),
    "bad soft_fail": (one_step(soft_fail="sometimes"), "10: `soft_fail` must be bool"),
    "soft_fail without status": (
        one_step(soft_fail="[{}]"),
        "10: `exit_status` is missing",
    ),
    "retry too often": (
        one_step(retry="{automatic: [{exit_status: -1, limit: 99}]}"),
        "10: `limit`: 99 is greater",
    ),
    "one job": (one_step(parallelism="1"), "10: `parallelism`: 1 is less"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_area(name, tmp_path, capsys):
    text, expected = BROKEN[name]
    root = repository(tmp_path, text)
    with pytest.raises(PipelineError) as error:
        load(root)
    assert str(error.value).startswith(f"{AREA}:{expected}")
    assert main(["--root", str(root), "check"]) == 1
    out, errors = capsys.readouterr()
    assert out == "" and errors == f"{error.value}\n"


def test_all_files_are_told_at_once(tmp_path):
    root = repository(tmp_path, "group: Area\n")
    write(root, AREA.replace("area.", "other."), one_step(device="", key="A"))
    with pytest.raises(PipelineError) as error:
        load(root)
    assert [line.rpartition(".yaml:")[2] for line in error.value.problems] == [
        "1: `steps` is missing",
        "4: `device` is missing",
        "5: `key`: 'A' does not match '^[a-z0-9][a-z0-9_-]*$'",
    ]


def test_an_alias_is_checked_where_it_is_defined(tmp_path):
    area = one_step(source_file_dependencies="&paths\n      - 7") + "    env: *paths\n"
    with pytest.raises(PipelineError) as error:
        load(repository(tmp_path, area))
    assert f"{AREA}:9: `0` must be string, is 7" in error.value.problems


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("queue: small, ", "", ".buildkite/ci_config.yaml:5: `queue` is missing"),
        ("limit: 2", "limit: 0", "9: `limit`: 0 is less than the minimum of 1"),
        ("[.buildkite/test_areas]", "[here]", "1: there is no *.yaml in here"),
    ],
)
def test_broken_config(old, new, expected, tmp_path):
    assert old in CONFIG
    with pytest.raises(PipelineError) as error:
        load(repository(tmp_path, config=CONFIG.replace(old, new)))
    assert expected in str(error.value)


def test_no_config(tmp_path):
    with pytest.raises(PipelineError, match=r"ci_config.yaml:1: there is no such file"):
        load(tmp_path)
