# SPDX-License-Identifier: Apache-2.0
"""Puts the tree together that gets installed: the release, our additions and edits."""

import ast
import hashlib
import json
import os
import shutil
from pathlib import Path
from zipfile import ZipFile
from zlib import crc32

from .base import ROOT, OverlayError
from .edits import SUFFIX, EditFile, noted
from .lock import require_lock
from .tree import PACKAGE, Release, additions, edit_files

VERSION = f"{PACKAGE}/_version.py"
RECORD = "composed.json"  # path to sha256 of each edited file, beside the package


def compose(
    wheel_path: Path,
    tree: Path,
    *,
    version: str | None = None,
    link: bool = False,
    allow_changed: bool | None = None,
    root: Path = ROOT,
) -> None:
    """Writes the package to `tree`/vllm, the release's metadata to `tree`/info.

    Args:
        wheel_path: the release's wheel; its hash is the caller's to check.
        tree: folder to write, emptied first.
        version: what `vllm.__version__` shall say; None keeps the release's.
        link: link additions instead of copying, so that changes of them are live.
        allow_changed: compose even where members differ from edits.lock;
            None asks the environment variable VLLM_ALLOW_CHANGED_MEMBERS.
        root: the repository.

    Raises:
        OverlayError: the overlay does not fit the release, or the tree has changes
            made by hand that are in no edit file yet.
    """
    if allow_changed is None:
        allow_changed = os.environ.get("VLLM_ALLOW_CHANGED_MEMBERS") == "1"
    with ZipFile(wheel_path) as wheel:
        release = Release(wheel)
        if not allow_changed:
            require_lock(release, root)
        texts = {edit.path: edited(release, edit) for edit in edit_files(root)}
        require_refreshed(release, tree, texts)
        shutil.rmtree(tree, ignore_errors=True)
        _unpack(wheel, tree)
    for path in additions(root):
        _place(root / path, tree / path, link)
    write_edited(tree, texts)
    if version:
        _write_version(tree / VERSION, version)


def edited(release: Release, edit: EditFile) -> str:
    """The text of an edited file.

    Raises:
        OverlayError: the release has no such file, a hunk does not fit it, or what
            comes out is no Python.
    """
    if edit.path not in release.names:
        raise OverlayError(f"{edit.path}{SUFFIX}:1: the release has no {edit.path}")
    text = noted(release.source(edit.path), edit)
    try:
        ast.parse(text)
    except SyntaxError as error:
        line = text.splitlines()[(error.lineno or 1) - 1].strip()
        raise OverlayError(
            f"{edit.path}{SUFFIX}: with its hunks {edit.path} is no Python at "
            f"{line!r}: {error.msg}"
        ) from None
    return text


def write_edited(tree: Path, texts: dict[str, str]) -> None:
    """Writes edited files, and remembers them."""
    record = _record(tree)
    for path, text in texts.items():
        (tree / path).write_text(text)
        record[path] = hashlib.sha256(text.encode()).hexdigest()
    (tree / RECORD).write_text(json.dumps(record, indent=1))


def _record(tree: Path) -> dict[str, str]:
    file = tree / RECORD
    return json.loads(file.read_text()) if file.exists() else {}


def changed_by_hand(release: Release, tree: Path) -> list[str]:
    """Python files of a composed tree that are not as they were composed.

    Among them are files that somebody made there, which a link would be otherwise.
    """
    record, found = _record(tree), []
    is_ours = (tree / RECORD).exists()  # and nothing else that lies there
    for file in sorted((tree / PACKAGE).rglob("*.py")) if is_ours else []:
        path = str(file.relative_to(tree))
        if file.is_symlink() or path == VERSION:
            continue
        content = file.read_bytes()
        if path in record:
            same = hashlib.sha256(content).hexdigest() == record[path]
        else:
            same = path in release.names and (
                crc32(content) == release.wheel.getinfo(path).CRC
            )
        found += [] if same else [path]
    return found


def require_refreshed(release: Release, tree: Path, texts: dict[str, str]) -> None:
    """Raises OverlayError where composing would lose what was written by hand."""
    lost = [
        path
        for path in changed_by_hand(release, tree)
        if texts.get(path) != (tree / path).read_text()
    ]
    if lost:
        raise OverlayError(
            "Changed by hand, and in no edit file yet:\n  "
            + "\n  ".join(str(tree / path) for path in lost)
            + "\nRun `python -m tools.overlay refresh` to keep these changes, or "
            "remove the files to drop them."
        )


def _unpack(wheel: ZipFile, tree: Path) -> None:
    wheel.extractall(tree)
    (info,) = tree.glob("*.dist-info")
    info.rename(tree / "info")


def _place(source: Path, target: Path, link: bool) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    target.unlink(missing_ok=True)
    if link:
        target.symlink_to(source.resolve())
    else:
        shutil.copyfile(source, target)


def _write_version(path: Path, version: str) -> None:
    release, _, local = version.partition("+")
    parts = (*map(int, release.split(".")), *([local] if local else []))
    path.write_text(
        "# Generated when the tree was composed.\n"
        f"__version__ = version = {version!r}\n"
        f"__version_tuple__ = version_tuple = {parts!r}\n"
        "__commit_id__ = commit_id = None\n"
    )
