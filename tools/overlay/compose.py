# SPDX-License-Identifier: Apache-2.0
"""Lays the overlay over the base: the full tree that gets installed."""

import ast
import os
import re
import shutil
from importlib.util import resolve_name
from pathlib import Path
from zipfile import ZipFile

from .base import ROOT
from .seams import PACKAGE, overlay_files, require_lock, seams_among, upstream_place

RELATIVE = re.compile(rb"from[\s.]*\.(\s*(?!import\b)[\w.]+)?")


def compose(
    wheel_path: Path,
    tree: Path,
    *,
    version: str | None = None,
    link: bool = False,
    allow_changed: bool | None = None,
    root: Path = ROOT,
) -> list[str]:
    """Writes base plus overlay to `tree`/vllm, the base's metadata to `tree`/info.

    Args:
        wheel_path: the base's wheel; its hash is the caller's to check.
        tree: folder to write, emptied first.
        version: what `vllm.__version__` shall say; None keeps the base's.
        link: link overlay files instead of copying, so that edits are live.
        allow_changed: compose even where the base differs from seams.lock;
            None asks the environment variable VLLM_ALLOW_CHANGED_SEAMS.
        root: the repository.

    Returns:
        The paths of the seams.

    Raises:
        OverlayError: a seam stands on a file that seams.lock does not know.
    """
    if allow_changed is None:
        allow_changed = os.environ.get("VLLM_ALLOW_CHANGED_SEAMS") == "1"
    shutil.rmtree(tree, ignore_errors=True)
    with ZipFile(wheel_path) as wheel:
        files = overlay_files(root)
        seams = seams_among(files, wheel)
        if not allow_changed:
            require_lock(seams, wheel, root)
        _unpack(wheel, tree)
    for path in seams:
        _set_aside(tree, path)
    for path in files:
        _place(root / path, tree / path, link)
    if version:
        _write_version(tree / PACKAGE / "_version.py", version)
    return seams


def _unpack(wheel: ZipFile, tree: Path) -> None:
    wheel.extractall(tree)
    (info,) = tree.glob("*.dist-info")
    info.rename(tree / "info")


def _set_aside(tree: Path, path: str) -> None:
    """Moves an upstream file under vllm/_upstream, where it stays importable."""
    source, place = tree / path, tree / upstream_place(path)
    for folder in reversed(place.relative_to(tree / PACKAGE / "_upstream").parents):
        package = tree / PACKAGE / "_upstream" / folder
        package.mkdir(exist_ok=True, parents=True)
        init = package / "__init__.py"
        if not init.exists():
            # The module may be the first to be imported; its own package comes first.
            init.write_text(f"import {'.'.join((PACKAGE, *folder.parts))}\n")
    text = source.read_text()
    source.unlink()
    is_package = place.name == "__init__.py"
    module = ".".join(Path(path).with_suffix("").parts).removesuffix(".__init__")
    home = module if is_package else module.rpartition(".")[0]
    place.write_text(absolute_imports(text, home) if place.suffix == ".py" else text)


def absolute_imports(text: str, package: str) -> str:
    """Turns relative imports into absolute ones.

    A moved file would resolve them against its new place, and so load its
    neighbours a second time, or not at all.

    Args:
        text: source of a module.
        package: the package that its relative imports start from.
    """
    lines = text.encode().splitlines(keepends=True)  # ast counts columns in bytes
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.level:
            name = resolve_name("." * node.level + (node.module or ""), package)
            line, at = lines[node.lineno - 1], node.col_offset
            new = RELATIVE.sub(f"from {name}".encode(), line[at:], count=1)
            lines[node.lineno - 1] = line[:at] + new
    return b"".join(lines).decode()


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
