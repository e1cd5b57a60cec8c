# SPDX-License-Identifier: Apache-2.0
"""Composing: the lock, the imports of moved files, and what lands in the tree."""

import pytest

from tests.overlay.fakes import addition, composed, seam, write_overlay, write_wheel
from tools.overlay.base import OverlayError
from tools.overlay.compose import absolute_imports, compose

BASE = {"vllm/part.py": "VALUE = 1\n", "vllm/data.json": "{}"}
OVERLAY = {"vllm/part.py": seam("vllm/part.py"), "vllm/new/extra.py": addition()}


def test_tree(tmp_path):
    tree = composed(tmp_path, BASE, OVERLAY).folder
    assert (tree / "vllm/part.py").read_text() == OVERLAY["vllm/part.py"]
    assert (tree / "vllm/_upstream/part.py").read_text() == "VALUE = 1\n"
    assert (tree / "vllm/new/extra.py").exists()
    assert (tree / "vllm/data.json").exists()
    assert (tree / "info/METADATA").exists()


def test_composing_again_leaves_nothing_behind(tmp_path):
    tree = composed(tmp_path, BASE, OVERLAY)
    (tree.root / "vllm/new/extra.py").unlink()
    wheel = write_wheel(tmp_path, BASE)
    compose(wheel, tree.folder, root=tree.root)
    assert not (tree.folder / "vllm/new").exists()


def test_version(tmp_path):
    tree = composed(tmp_path, BASE, OVERLAY)
    wheel = write_wheel(tmp_path, BASE)
    compose(wheel, tree.folder, version="1.0.0+fake.1.cpu", root=tree.root)
    code = "import vllm, vllm._version as v; print(vllm.__version__, v.version_tuple)"
    assert tree.run(code) == "1.0.0+fake.1.cpu (1, 0, 0, 'fake.1.cpu')"


def test_changed_seam(tmp_path, monkeypatch):
    wheel = write_wheel(tmp_path / "old", BASE)
    root = write_overlay(tmp_path / "repo", OVERLAY, wheel)
    changed = write_wheel(tmp_path / "new", {**BASE, "vllm/part.py": "VALUE = 2\n"})
    monkeypatch.delenv("VLLM_ALLOW_CHANGED_SEAMS", raising=False)
    with pytest.raises(OverlayError, match=r"vllm/part.py: .*not the one") as error:
        compose(changed, tmp_path / "tree", root=root)
    assert "VLLM_ALLOW_CHANGED_SEAMS=1" in str(error.value)
    assert not (tmp_path / "tree").exists()
    monkeypatch.setenv("VLLM_ALLOW_CHANGED_SEAMS", "1")
    assert compose(changed, tmp_path / "tree", root=root) == ["vllm/part.py"]


def test_vanished_and_unlocked_seams(tmp_path):
    wheel = write_wheel(tmp_path / "old", BASE)
    root = write_overlay(tmp_path / "repo", OVERLAY, wheel)
    files = {"vllm/new/extra.py": "", "vllm/data.json": "{}"}
    other = write_wheel(tmp_path / "new", files)
    with pytest.raises(OverlayError) as error:
        compose(other, tmp_path / "tree", root=root)
    assert "vllm/part.py: the base no longer has this file" in str(error.value)
    assert "vllm/new/extra.py: not in seams.lock" in str(error.value)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("from . import x\n", "from vllm.a import x\n"),
        ("from .b import x\n", "from vllm.a.b import x\n"),
        ("from .. import y as z\n", "from vllm import y as z\n"),
        ("from ..b.c import y\n", "from vllm.b.c import y\n"),
        ("from .b import (\n  x,\n  y)\n", "from vllm.a.b import (\n  x,\n  y)\n"),
        ("from  .b  import x  # from .c\n", "from vllm.a.b  import x  # from .c\n"),
        ("if T:\n    from .b import x\n", "if T:\n    from vllm.a.b import x\n"),
        ("def f():\n\tfrom . import x\n", "def f():\n\tfrom vllm.a import x\n"),
        ("import os; from .b import x\n", "import os; from vllm.a.b import x\n"),
        ("with C: from .b import x\n", "with C: from vllm.a.b import x\n"),
        ("s = 'é'; from .b import x\n", "s = 'é'; from vllm.a.b import x\n"),
        ("s = '''\nfrom .b import x\n'''\n", "s = '''\nfrom .b import x\n'''\n"),
        ("from . b import x\n", "from vllm.a.b import x\n"),
        ("from .b import *\r\n", "from vllm.a.b import *\r\n"),
        ("from vllm.c import x\n", "from vllm.c import x\n"),
    ],
)  # fmt: skip
def test_absolute_imports(source, expected):
    assert absolute_imports(source, "vllm.a") == expected


def test_relative_imports_of_module_and_package(tmp_path):
    names = ("vllm/a/__init__.py", "vllm/a/part.py")
    base = dict.fromkeys(names, "from .other import NAME\n")
    tree = composed(
        tmp_path,
        {**base, "vllm/a/other.py": "NAME = 1\n"},
        {name: seam(name) for name in names},
    )
    for name in names:
        moved = tree.folder / name.replace("vllm/", "vllm/_upstream/", 1)
        assert moved.read_text() == "from vllm.a.other import NAME\n"
