# SPDX-License-Identifier: Apache-2.0
"""What tests name runs their step."""

import pytest

from tests.ci.fakes import AREA, pipelines, repository, write
from tools.ci.check import check
from tools.ci.reads import reads
from tools.ci.steps import load


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ('text = (ROOT / "other" / "a.py").read_text()', {"other/a.py"}),
        ('text = (steps.ROOT / "other/a.py").read_text()', {"other/a.py"}),
        ('text = (DOCS / "page.md").read_text()', {"docs/page.md"}),
        # As far as it is known.
        ('text = (ROOT / "other" / name / "a.py").read_text()', {"other/"}),
        ("text = (ROOT / name).read_text()", set()),
        ("here = Path(__file__).resolve().parents[2] / 'other'", {"other/"}),
        ("Path(__file__).parents[1] / 'two/test_a.py'", {"tests/two/test_a.py"}),
        # Nothing that is there.
        ('output = ROOT / "build" / "a.json"', set()),
        ('half = WHOLE / 2; text = (tmp_path / "other")', set()),
        ("from tools.docs import pages", {"tools/docs/pages.py"}),
        ("from tools.docs.pages import fences", {"tools/docs/pages.py"}),
        ("import tools.docs.pages as p", {"tools/docs/pages.py"}),
        ("import pages, os.path", set()),
    ],
)
def test_reads(source: str, expected: set[str], tmp_path):
    root = repository(tmp_path)
    for name in ("docs/page.md", "tools/docs/pages.py"):
        write(root, name, "")
    test = write(root, "tests/one/test_b.py", source)
    assert reads(test, root) == expected


NAMED = {
    "other/a.py": ["One", "GPU"],
    "src/a.py": [],
    "tests/one/test_a.py": [],
    "tests/two/test_a.py": ["One", "GPU"],
    "base.toml": [],
}


@pytest.mark.parametrize("name", NAMED)
def test_steps_that_do_not_run_for_what_they_read(name: str, tmp_path):
    root = repository(tmp_path)
    write(root, "base.toml", "")
    write(root, "tests/one/helper.py", f'ROOT / "{name}"')
    found = [line for line in check(load(root)) if "helper.py reads" in line]
    assert [line.split(": ")[1] for line in found] == NAMED[name]
    for line in found:
        assert line.startswith(AREA) and f"reads {name}, name it" in line


def test_a_step_of_everything_names_nothing(tmp_path):
    area = """\
        group: Area
        steps:
          - {label: A, key: a, device: cpu, timeout_in_minutes: 1,
             commands: [pytest tests]}
        """
    pipelines(tmp_path, area)
    write(tmp_path, "tests/one/test_b.py", 'ROOT / "other/a.py"')
    assert check(load(tmp_path)) == []
