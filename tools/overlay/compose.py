# SPDX-License-Identifier: Apache-2.0
"""Composes the tree that is installed: the release, our additions and edits."""

import ast
import compileall
import math
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from zipfile import ZipFile

from .base import ROOT, Base, OverlayError, find_wheel, local_version, pinned_base
from .edits import NOTE, EditFile, composed, error
from .kernels import checked_kernels, unpack
from .lock import require_lock
from .native import build
from .tree import PACKAGE, Release, additions, edit_files

VERSION = f"{PACKAGE}/_version.py"
EDITABLE = ROOT / "build" / "editable"
STAMP = "composed"  # beside the package: newer files were changed by hand


def compose_for(device: str, tree: Path, link: bool = False) -> None:
    """Composes the pinned release of a device, including native kernels for a CPU."""
    base = pinned_base(device)
    wheel, version = find_wheel(base), local_version(base)
    compose(wheel, tree, version=version, link=link, kernels=base.kernels)
    if device == "cpu":
        build(tree)


def compose(
    wheel_path: Path,
    tree: Path,
    *,
    version: str | None = None,
    link: bool = False,
    kernels: Base | None = None,
    root: Path = ROOT,
) -> None:
    """Writes the package to `tree`/vllm, the release's metadata to `tree`/info.

    With VLLM_ALLOW_CHANGED_MEMBERS=1 in the environment members may differ from
    edits.lock.

    Args:
        wheel_path: the release's wheel; the caller checks its hash.
        tree: folder to write, emptied first.
        version: value of `vllm.__version__`; None keeps the release's.
        link: link additions instead of copying them, so that changes are live.
        kernels: another wheel, whose libraries take the place of the release's.
        root: the repository.

    Raises:
        OverlayError: the overlay does not fit the release, or the tree has manual
            changes that are in no edit file yet.
    """
    with ZipFile(wheel_path) as wheel:
        release = Release(wheel)
        if os.environ.get("VLLM_ALLOW_CHANGED_MEMBERS") != "1":
            require_lock(release, root)
        texts = {edit.path: edited(release, edit) for edit in edit_files(root)}
        _require_refreshed(release, tree, texts)
        libraries = checked_kernels(kernels, release) if kernels else None
        shutil.rmtree(tree, ignore_errors=True)
        unpack(wheel, libraries, tree)
    (info,) = tree.glob("*.dist-info")
    info.rename(tree / "info")
    place = os.symlink if link else shutil.copyfile
    for path in additions(root):
        (tree / path).parent.mkdir(parents=True, exist_ok=True)
        place((root / path).resolve(), tree / path)
    for path, text in texts.items():
        (tree / path).write_text(text)
    if version:
        _write_version(tree / VERSION, version)
    if link:
        (tree / STAMP).touch()
        # As pip does for other installs: imports take a quarter less time.
        compileall.compile_dir(tree / PACKAGE, quiet=2, workers=0)


def edited(release: Release, edit: EditFile) -> str:
    """An edited file, with a line at its end that says that it was modified.

    Raises:
        OverlayError: the release has no such file, a hunk does not fit it, or the
            result is not valid Python.
    """
    if edit.path not in release.names:
        raise error(edit.path, 1, f"vLLM has no {edit.path}")
    text = composed(release.source(edit.path), edit.hunks())
    try:
        ast.parse(text)
    except SyntaxError as problem:
        line = text.splitlines()[problem.lineno - 1].strip()
        what = f"with its hunks {edit.path} is no Python at {line!r}: {problem.msg}"
        raise error(edit.path, 1, what) from None
    return text + NOTE.format(path=edit.path)


def changed_by_hand(tree: Path) -> Iterator[str]:
    """Modules changed or added since an editable tree was composed."""
    stamp = tree / STAMP
    # By ctime: a file that is moved into the tree keeps its mtime.
    composed_at = stamp.stat().st_ctime_ns if stamp.exists() else math.inf
    for file in sorted((tree / PACKAGE).rglob("*.py")):
        if not file.is_symlink() and file.stat().st_ctime_ns > composed_at:
            yield str(file.relative_to(tree))


def _require_refreshed(release: Release, tree: Path, texts: dict[str, str]) -> None:
    """Raises OverlayError if composing would lose manual changes."""
    lost = [
        str(tree / path)
        for path in changed_by_hand(tree)
        if (tree / path).read_text() not in (texts.get(path), release.source(path).text)
    ]
    if lost:
        raise OverlayError(
            "Changed by hand, and in no edit file yet:\n  " + "\n  ".join(lost) + "\n"
            "Run `python -m tools.overlay refresh` to keep that, or remove the files."
        )


def unpack_install(base: Base, folder: Path) -> None:
    """Unpacks a release to a folder that works like an install if on the path.

    vLLM reads the version in its metadata, and selects the CPU platform if it contains
    `cpu`.
    """
    with ZipFile(find_wheel(base)) as wheel:
        unpack(wheel, base.kernels and find_wheel(base.kernels), folder)
    version = base.version + ("+cpu" if base.device == "cpu" else "")
    (info,) = folder.glob("*.dist-info")
    info = info.rename(folder / f"vllm-{version}.dist-info")
    headers = (info / "METADATA").read_text()
    for key, value in (("Name", "vllm"), ("Version", version)):
        headers = re.sub(rf"(?m)^{key}: .*", f"{key}: {value}", headers, count=1)
    (info / "METADATA").write_text(headers)


def _write_version(path: Path, version: str) -> None:
    release, _, local = version.partition("+")
    parts = (*map(int, release.split(".")), *([local] if local else []))
    path.write_text(
        f"__version__ = version = {version!r}\n"
        f"__version_tuple__ = version_tuple = {parts!r}\n"
    )
