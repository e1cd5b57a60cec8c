# SPDX-License-Identifier: Apache-2.0
"""Writes the series: one commit per patch, `git format-patch`, pull-request texts."""

import re
import tempfile
from pathlib import Path
from zipfile import ZipFile

from tools.overlay.base import ROOT, load_config

from .measured import filled
from .results import load as load_results
from .results import sentence, whole_sentence
from .series import Series, load
from .tree import States, commit, git, identity, make_base

RESULT = "## Test result\n\n"


def export(output: Path, wheel_path: Path, root: Path = ROOT) -> list[Path]:
    """The patches, in order; beside each one lies its pull-request text.

    Raises:
        SeriesError: a file of ours has no place in the series.
        FoldError: a seam cannot be folded.
    """
    series = load()
    output.mkdir(parents=True, exist_ok=True)
    for old in output.glob("[0-9][0-9][0-9][0-9]-*"):
        old.unlink()
    with ZipFile(wheel_path) as wheel, tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "base"
        commit_all(series, wheel, tree, root)
        first = git(tree, "rev-list", "--max-parents=0", "HEAD")
        options = ["--quiet", "--full-index", "--no-signature", "--zero-commit"]
        git(tree, "format-patch", *options, "-o", str(output.resolve()), first)
    patches, known = sorted(output.glob("*.patch")), load_results()
    for file, patch in zip(patches, series.patches, strict=True):
        text = (root / patch.text).read_text()
        told = "".join(
            f"{line}\n\n"
            for line in (sentence(patch.title, known), whole_sentence(known))
            if line
        )
        text = filled(text.replace(RESULT, RESULT + told))
        file.with_suffix(".md").write_text(text)
    return patches


def commit_all(series: Series, wheel: ZipFile, tree: Path, root: Path = ROOT) -> None:
    """Makes `tree` a repository of the base's files with one commit per patch."""
    who = identity(root)
    make_base(wheel, tree, load_config(root)["version"], who)
    states = States(series, wheel, root)
    for number, patch in enumerate(series.patches):
        for path, text in states.files(number).items():
            (tree / path).parent.mkdir(parents=True, exist_ok=True)
            (tree / path).write_text(text)
        sign = f"Signed-off-by: {who['GIT_AUTHOR_NAME']} <{who['GIT_AUTHOR_EMAIL']}>"
        purpose = section((root / patch.text).read_text(), "Purpose")
        commit(tree, f"{patch.title}\n\n{purpose}\n\n{sign}", who)


def section(text: str, title: str) -> str:
    """What stands under a heading of a pull-request text."""
    found = re.search(rf"(?ms)^## {title}\n+(.*?)(?=^## |\Z)", text)
    return found.group(1).strip() if found else ""
