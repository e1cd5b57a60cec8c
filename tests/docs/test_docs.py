# SPDX-License-Identifier: Apache-2.0
"""The documentation builds without a warning, and what it names and shows is true."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tools.docs import DOCS, ROOT, generated, names, pages

# Not --quiet: what is not logged is not counted either.
BUILD = [sys.executable, "-m", "mkdocs", "build", "--strict"]
BROKEN = {
    "gone.md": "[gone](gone.md)",
    "#gone": "[no such anchor](start.md#gone)",
    "images/gone.svg": "![no such picture](images/gone.svg)",
    "../README.md": "[outside](../README.md)",
}


def build(root: Path, site: Path) -> subprocess.CompletedProcess:
    return subprocess.run(
        [*BUILD, "--config-file", str(root / "mkdocs.yaml"), "--site-dir", str(site)],
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )


def test_builds_without_a_warning(tmp_path: Path):
    done = build(ROOT, tmp_path)
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stderr
    for page in DOCS.glob("**/*.md"):
        html = tmp_path / page.relative_to(DOCS).with_suffix(".html")
        text = html.read_text()
        assert page == DOCS / "index.md" or "<h1" in text
        # A fence or a table that Markdown does not take is left in a paragraph.
        assert not re.search(r"<p>(```|\|)", text), page


def test_what_is_broken_fails_the_build(tmp_path: Path):
    """Links to what is not there, and a page that the navigation leaves out."""
    shutil.copy(ROOT / "mkdocs.yaml", tmp_path)
    shutil.copytree(DOCS, tmp_path / "docs")
    with (tmp_path / "docs" / "design.md").open("a") as file:
        file.writelines(f"\n{link}\n" for link in BROKEN.values())
    (tmp_path / "docs" / "left-out.md").write_text("# Left out\n")
    done = build(tmp_path, tmp_path / "site")
    assert done.returncode == 1
    warnings = [line for line in done.stderr.splitlines() if "WARNING" in line]
    for target in BROKEN:
        assert any("design.md" in line and target in line for line in warnings), target
    assert "left-out.md" in done.stderr
    assert len(warnings) == len(BROKEN) + 1, warnings


def test_names_on_pages_exist():
    assert list(names.unknown_names()) == []


@pytest.mark.parametrize(
    "span",
    [
        "tests/gone.py",
        "tests/docs/test_docs.py::test_gone",
        "vllm/v1/worker/gpu/gone.py",
        "python -m tools.gone",
        "make gone",
    ],
)
def test_a_name_that_stands_for_nothing_is_found(span: str):
    assert len(list(names.problems_of(span))) == 1


def test_names_that_exist_are_not_complained_of():
    for span in (
        "tests/docs/test_docs.py::test_names_on_pages_exist",
        "vllm/v1/worker/gpu/model_runner.py",  # the base's
        "benchmarks/results/*/engine.json",
        "python -m tools.docs",
        "python -m pytest",
        "make docs",
    ):
        assert list(names.problems_of(span)) == []


def test_generated_parts_are_current():
    assert generated.outdated() == [], "run `make docs`"


def test_generated_parts_are_replaced():
    page = "a\n<!-- generated: x -->\nold\n<!-- end: x -->\nb"
    once = generated.with_generated(page, {"x": lambda: "new"})
    assert "old" not in once and "new" in once
    assert generated.with_generated(once, {"x": lambda: "new"}) == once


@pytest.mark.parametrize("page", ["guarantees.md", "origins.md"])
def test_each_row_names_a_test(page: str):
    """Or what a command recorded; or says, in so many words, that there is none."""
    rows = re.findall(r"^\| .+ \|$", (DOCS / page).read_text(), re.MULTILINE)
    rows = [row for row in rows if not re.match(r"\| (---|item|promise)", row)]
    assert len(rows) > 10
    for row in rows:
        last = row.strip("| ").split(" | ")[-1]
        shown = r"`tests/[\w/]+\.py::test_\w+`|`benchmarks/results/[\w/.-]+`"
        assert re.search(shown, last) or last.startswith("not tested: "), row


def test_short_names_of_the_origins_are_files():
    text = (DOCS / "origins.md").read_text()
    (folder,) = re.findall(r"`U/` stands for `([\w/]+)/`", text)
    names_of_files = set(re.findall(r"`U/([\w.]+)`", text))
    assert len(names_of_files) > 3
    for name in names_of_files:
        assert (ROOT / folder / name).is_file(), name


def test_commands_of_a_block():
    fence = pages.Fence(
        Path("x"), 1, "bash", "", "a \\\n    b  # why\n# note\n\nc '{\n  d}' e\nf\n"
    )
    assert pages.commands(fence) == ["a b", "c '{\n  d}' e", "f"]
