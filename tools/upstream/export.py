# SPDX-License-Identifier: Apache-2.0
"""Exports the series: a commit and a patch file per patch, pull-request texts."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from zipfile import ZipFile

from tools.overlay.base import (
    ROOT,
    OverlayError,
    find_wheel,
    pinned_base,
    target_device,
)
from tools.overlay.compose import unpack_install
from tools.overlay.edits import composed
from tools.overlay.tree import Release, edit_files

from .series import DOWNSTREAM, Series, load, moved, place

ISORT = 'lint.isort.known-first-party=["vllm", "tests"]'


def export(output: Path, root: Path = ROOT) -> list[Path]:
    """Writes the patches, each with its pull-request text; returns them in order.

    They are the commits of a repository, `output`/tree, whose first one has the files
    of the release. With the tree on the path it works like an install.

    Raises:
        OverlayError: a file of ours is missing in the series, or an edit does not fit
            without later patches.
    """
    series, who, tree = load(), identity(root), output.resolve() / "tree"
    for old in output.glob("[0-9][0-9][0-9][0-9]-*"):
        old.unlink()
    shutil.rmtree(tree, ignore_errors=True)
    unpack_install(base := pinned_base(target_device()), tree)
    git(tree, "init", "--quiet", "--initial-branch=main")
    git(tree, "config", "core.autocrlf", "false")
    (tree / ".git/info/exclude").write_text("*.so*\n*.libs\n*.dist-info\n")
    commit(tree, f"vLLM {base.version}", who)
    with ZipFile(find_wheel(base)) as wheel:
        states = files_by_patch(series, Release(wheel), root)
        for patch, files in zip(series.patches, states, strict=True):
            for path, text in files.items():
                (tree / path).parent.mkdir(parents=True, exist_ok=True)
                (tree / path).write_text(text)
            if modules := [path for path in files if path.endswith(".py")]:
                sort_imports(tree, modules)
            purpose = section((root / patch.text).read_text(), "Purpose")
            sign = "{GIT_AUTHOR_NAME} <{GIT_AUTHOR_EMAIL}>".format(**who)
            message = f"{patch.title}\n\n{purpose}\n\nSigned-off-by: {sign}"
            commit(tree, message, who)
    first = git(tree, "rev-list", "--max-parents=0", "HEAD")
    options = ["--quiet", "--full-index", "--no-signature", "--zero-commit"]
    git(tree, "format-patch", *options, "-o", "..", first)
    patches = sorted(output.glob("*.patch"))
    for file, patch in zip(patches, series.patches, strict=True):
        file.with_suffix(".md").write_text((root / patch.text).read_text())
    return patches


def files_by_patch(
    series: Series, release: Release, root: Path = ROOT
) -> Iterator[dict[str, str]]:
    """For each patch, the paths and texts of the files that it adds or changes."""
    homes, edits = series.homes(root), edit_files(root)
    taken = [file for file, home in homes.items() if home != DOWNSTREAM]
    slugs: set[str] = set()
    for number, patch in enumerate(series.patches):
        slugs.add(patch.slug)
        files = {}
        for edit in edits:
            if edit.hunks({patch.slug}):
                source = release.source(edit.path)
                files[edit.path] = composed(source, edit.hunks(slugs))
        for file in (file for file in taken if homes[file] == number):
            files[place(file)] = moved((root / file).read_text(), file, taken)
        yield files


def sort_imports(tree: Path, files: list[str]) -> None:
    """Sorts imports as vLLM does, since hunks and moved files change their order."""
    command = [sys.executable, "-m", "ruff", "check", "--select=I", "--fix", "--quiet"]
    command += ["--no-cache", "--isolated", f"--config={ISORT}", *files]
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True)
    if done.returncode:
        raise OverlayError(f"ruff, of requirements/test.txt: {done.stderr.strip()}")


def section(text: str, title: str) -> str:
    """The text under a heading of a pull-request text."""
    found = re.search(rf"(?ms)^## {title}\n+(.*?)(?=^## |\Z)", text)
    return found.group(1).strip() if found else ""


# The Git repository in which patches are made.


def git(folder: Path, *arguments: str, **variables: str) -> str:
    """Runs a git command; returns its output, or raises OverlayError with its error."""
    command = ["git", "-c", "commit.gpgsign=false", "-c", "gc.auto=0", *arguments]
    environment = os.environ | variables
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True
    )
    if done.returncode:
        raise OverlayError(f"git {arguments[0]}: {done.stderr.strip() or done.stdout}")
    return done.stdout.strip()


def identity(root: Path = ROOT) -> dict[str, str]:
    """Author and date of the last commit here, so that exports are reproducible."""
    name, mail, date = git(root, "log", "-1", "--format=%an%n%ae%n%cI").splitlines()
    return {
        f"GIT_{who}_{what}": value
        for who in ("AUTHOR", "COMMITTER")
        for what, value in (("NAME", name), ("EMAIL", mail), ("DATE", date))
    }


def commit(folder: Path, message: str, who: dict[str, str]) -> None:
    git(folder, "-c", "core.excludesFile=", "add", "--all")
    git(folder, "commit", "--quiet", "--message", message, **who)
