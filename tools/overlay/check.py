# SPDX-License-Identifier: Apache-2.0
"""Checks that the overlay is what it says: additions, short seams, nothing copied."""

import ast
from collections.abc import Iterator
from pathlib import Path
from zipfile import ZipFile

from .base import ROOT
from .repeats import repeat_problems
from .seams import PACKAGE, UPSTREAM, lock_problems, overlay_files, seams_among

HEADER = ("Why:", "How:", "Upstream:", "Until:")
SPDX = "# SPDX-License-Identifier: Apache-2.0"
MAX_SEAM = 60


def check(wheel_path: Path, root: Path = ROOT) -> list[str]:
    """All that is wrong, one line each: `path:line: what, what to do`."""
    files = overlay_files(root)
    with ZipFile(wheel_path) as wheel:
        seams = seams_among(files, wheel)
        found = list(place_problems(files, seams, wheel))
        for path in files:
            if path.endswith(".py"):
                found += text_problems(path, (root / path).read_text(), path in seams)
        for line in lock_problems(seams, wheel, root):
            path, _, what = line.partition(": ")
            found.append(f"{path}:1: {what}, review it and run `lock`")
        return found + repeat_problems(wheel, root)


def module_path(path: str) -> str:
    """What a file is imported as: packages, modules and extensions alike."""
    stem = path.removesuffix("/__init__.py")
    folder, _, name = stem.rpartition("/")
    return f"{folder}/{name.partition('.')[0]}"


def place_problems(files: list[str], seams: list[str], wheel: ZipFile) -> Iterator[str]:
    upstream = {
        module_path(name): name
        for name in wheel.namelist()
        if name.endswith((".py", ".so"))
    }
    for path in files:
        hidden = upstream.get(module_path(path), path)
        if path == f"{PACKAGE}/__init__.py":
            yield f"{path}:1: hides the installed package, remove it"
        elif path.startswith(f"{UPSTREAM}/") and path != f"{UPSTREAM}/__init__.py":
            yield f"{path}:1: this folder is for upstream's files, put it elsewhere"
        elif path in seams and not path.endswith(".py"):
            yield f"{path}:1: replaces a file of the base that is no module, remove it"
        elif path.endswith(".py") and hidden != path and path not in seams:
            yield f"{path}:1: hides the base's {hidden}, make it a seam at that path"


def text_problems(path: str, text: str, is_seam: bool) -> Iterator[str]:
    if not text.strip() and path.endswith("/__init__.py") and not is_seam:
        return
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        yield f"{path}:{error.lineno}: {error.msg}, mend it"
        return
    if text.partition("\n")[0] != SPDX:
        yield f"{path}:1: has no licence line, start it with `{SPDX}`"
    doc = ast.get_docstring(tree)
    if is_seam:
        yield from seam_problems(path, text, tree, doc or "")
    elif not doc:
        yield f"{path}:1: has no docstring, say what the module is for"


def seam_problems(path: str, text: str, tree: ast.Module, doc: str) -> Iterator[str]:
    title = f"Seam on `{path}`."
    lines = doc.splitlines() or [""]
    if lines[0] != title:
        yield f'{path}:2: is a seam without its title, start its docstring "{title}"'
    for label in HEADER:
        if not any(line.startswith(label) for line in lines):
            yield f"{path}:2: its header has no part `{label}`, add it"
    if not any(ast.unparse(node) == "stand_on(__name__)" for node in calls(tree)):
        yield f"{path}:1: stands on nothing, call `stand_on(__name__)` at its top"
    length = len(text.splitlines())
    if length >= MAX_SEAM:
        yield (
            f"{path}:{MAX_SEAM}: is {length} lines long, move what is not the "
            f"change itself to an addition until it is under {MAX_SEAM}"
        )


def calls(tree: ast.Module) -> Iterator[ast.Call]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.Call))
