# SPDX-License-Identifier: Apache-2.0
"""Exports the series: a commit and a patch file per patch, pull-request texts."""

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

PURPOSE = re.compile(r"(?ms)^## Purpose\n+(.*?)\s*(?=^## |\Z)")
SETTINGS = {
    "commit.gpgsign": "false",
    "core.autocrlf": "false",
    "core.excludesFile": "",
    "gc.auto": "0",
}
ISORT = 'lint.isort.known-first-party=["vllm", "tests"]'


def export(output: Path, root: Path = ROOT) -> list[Path]:
    """Writes the patches, each with its pull-request text; returns them in order.

    They are the commits of a repository, `output`/tree, whose first one has the files
    of the release. With the tree on the path it works like an install.

    Raises:
        OverlayError: a file of ours is missing in the series, or an edit does not fit
            without later patches.
    """
    series, tree = load(), output.resolve() / "tree"
    for old in output.glob("[0-9][0-9][0-9][0-9]-*"):
        old.unlink()
    shutil.rmtree(tree, ignore_errors=True)
    unpack_install(base := pinned_base(target_device()), tree)
    # As of the last commit here, so that exports are reproducible.
    name, mail, date = git(root, "log", "-1", "--format=%an%n%ae%n%cI").splitlines()
    git(tree, "init", "--quiet", "--initial-branch=main")
    for key, value in (SETTINGS | {"user.name": name, "user.email": mail}).items():
        git(tree, "config", key, value)
    (tree / ".git/info/exclude").write_text("*.so*\n*.libs\n*.dist-info\n")
    commit(tree, f"vLLM {base.version}", date)
    with ZipFile(find_wheel(base)) as wheel:
        states = files_by_patch(series, Release(wheel), root)
        for patch, files in zip(series.patches, states, strict=True):
            for path, text in files.items():
                (tree / path).parent.mkdir(parents=True, exist_ok=True)
                (tree / path).write_text(text)
            if modules := [path for path in files if path.endswith(".py")]:
                sort_imports(tree, modules)
            purpose = PURPOSE.search((root / patch.text).read_text())[1]
            commit(tree, f"{patch.title}\n\n{purpose}", date)
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


def git(folder: Path, *arguments: str) -> str:
    """Runs a git command; returns its output, or raises OverlayError with its error."""
    command = ["git", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise OverlayError(f"git {arguments[0]}: {done.stderr.strip() or done.stdout}")
    return done.stdout.strip()


def commit(tree: Path, message: str, date: str) -> None:
    git(tree, "add", "--all")
    git(tree, "commit", "--quiet", "--signoff", "--date", date, "--message", message)
