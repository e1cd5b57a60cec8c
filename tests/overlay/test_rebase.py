# SPDX-License-Identifier: Apache-2.0
"""Changes of another release to members that we rely on are reported, no others."""

import re
from zipfile import ZipFile

import pytest

from tests.overlay.fakes import METADATA, addition, edit, write_overlay, write_wheel
from tools.overlay import __main__ as commands
from tools.overlay.base import Base
from tools.overlay.lock import read_lock
from tools.overlay.rebase import rebase
from tools.overlay.relied import Reader
from tools.overlay.tree import Release

PART = "vllm/part.py"
OLD_PART = """\
class Config:
    size: int = 1

    def check(self):
        first = 1
        second = 2
        return first + second

    def untouched(self):
        return 1


def other():
    return 1
"""
OLD = {
    PART: OLD_PART,
    "vllm/models/__init__.py": "from vllm.models.child import Child\n",
    "vllm/models/child.py": """\
        from .parent import Parent

        class Child(Parent):
            def run(self): return 1
            def rest(self): return 1
        """,
    "vllm/models/parent.py": """\
        class Parent:
            def __init__(self, size): self.size = size
            def inner(self): return 1
            def outer(self): return 1
        """,
    "vllm/tools.py": """\
        LIMIT = 1
        def helper(): return 1
        def unused(): return 1
        class Box:
            count: int = 0
            name: str = ""
            def open(self): pass
            def shut(self): pass
        """,
}
ADDITION = """
from vllm import tools
from vllm.models import Child
from vllm.tools import LIMIT, Box


class Grandchild(Child):
    def run(self):
        return super().run() + self.inner()


def use(box: "Box | None"):
    tools.helper()
    box.open()
    return Box(count=1)

"""
OVERLAY = {
    f"{PART}.edit": edit("@@ Config.check, after line 3\n        second = 3\n"),
    "vllm/added.py": addition(ADDITION),
}


@pytest.fixture
def report(tmp_path):
    def of(new: dict[str, str], **more) -> str:
        old_wheel = write_wheel(tmp_path, OLD)
        new_wheel = write_wheel(tmp_path, new, "2.0.0", more.pop("metadata", METADATA))
        root = write_overlay(tmp_path / "repo", OVERLAY, old_wheel)
        return rebase(old_wheel, new_wheel, root, **more)

    return of


def test_members_that_additions_rely_on(tmp_path):
    wheel = write_wheel(tmp_path, OLD)
    root = write_overlay(tmp_path / "repo", OVERLAY, wheel)
    with ZipFile(wheel) as archive:
        found = Reader(Release(archive), root).relied_on()
    assert found == {
        ("vllm/models/child.py", "Child"),
        ("vllm/models/child.py", "Child.run"),
        ("vllm/models/parent.py", "Parent.__init__"),
        ("vllm/models/parent.py", "Parent.inner"),
        ("vllm/tools.py", "LIMIT"),
        ("vllm/tools.py", "helper"),
        ("vllm/tools.py", "Box"),
        ("vllm/tools.py", "Box.open"),
        ("vllm/tools.py", "Box.count"),
    }
    assert set(read_lock(root)) == found | {(PART, "Config.check")}


def test_nothing_to_do(report):
    """Members that we do not rely on may change, and lines may move."""
    new = OLD | {PART: "import os\n\n\n" + OLD_PART.replace("n 1", "n 2")}
    new["vllm/tools.py"] = OLD["vllm/tools.py"].replace("unused", "renamed")
    assert report(new).splitlines()[-1] == (
        "0 members that changed, 0 hunks to place by hand, 0 requirements changed."
    )


def test_changed_and_removed_members(report):
    new = OLD | {"vllm/models/child.py": "class Child:\n    pass\n"}
    changed = OLD["vllm/tools.py"].replace("open(self): pass", "open(): 1")
    found = report(new | {"vllm/tools.py": changed.replace("LIMIT = 1", "")})
    assert (
        "### `vllm/tools.py`, `Box.open`\n\n```diff\n@@ -1 +1 @@\n-    def o" in found
    )
    assert "### `vllm/models/child.py`, `Child.run` is gone\n" in found
    assert "rest" not in found and "helper" not in found
    assert "### `vllm/tools.py`, `LIMIT` is gone\n" in found


def test_hunk_moves_with_its_lines(report, tmp_path):
    longer = OLD_PART.replace("        first", "        zeroth = 0\n        first")
    found = report(OLD | {PART: longer}, write=True)
    assert "+        zeroth = 0\n" in found and "place by hand: 0" in found
    written = (tmp_path / f"repo/{PART}.edit").read_text()
    assert "@@ Config.check, after line 4\n        second = 3\n" in written


def test_hunk_to_place_by_hand(report):
    found = report(OLD | {PART: "class Config:\n    def check(self): 1\n"})
    assert f"- {PART}.edit:5: the lines that it stands at are gone" in found
    found = report(OLD | {PART: "class Config:\n    pass\n"})
    assert f"- {PART}.edit:5: vLLM's file has no Config.check" in found


def test_requirements(report):
    found = report(OLD, metadata=METADATA.replace("torch==2.13.0+cpu", "torch==3.0"))
    assert "- gone: `Requires-Dist: torch==2.13.0+cpu`\n" in found
    assert "- new: `Requires-Dist: torch==3.0`\n" in found
    assert found.endswith("2 requirements changed.\n")


def test_gone_names_are_looked_up(report, monkeypatch):
    """What additions and edits import, and what strings name."""
    hunk = edit("@@ imports\nfrom vllm.tools import unused\n")
    monkeypatch.setitem(OVERLAY, f"{PART}.edit", hunk)
    named = addition('NAMES = "vllm.models.child.Child", "vllm.no.Name", "vllm is"\n')
    monkeypatch.setitem(OVERLAY, "vllm/added.py", named)
    moved = {"vllm/moved.py": "def unused(): pass\nclass Child: pass\n"}
    found = report({PART: OLD_PART} | moved)
    assert re.findall("(?m)^### (.*)", found) == [
        "`vllm/models/child.py`, `Child` is gone, now in `vllm/moved.py`",
        "`vllm/tools.py`, `unused` is gone, now in `vllm/moved.py`",
    ]


def test_new_members_with_names_that_we_use(report, monkeypatch):
    """A property in place of an attribute that we set, a field that we add."""
    sets = ADDITION.replace("def run(self):", "def run(self):\n        self.size = 2")
    monkeypatch.setitem(OVERLAY, "vllm/added.py", addition(sets))
    size = "    @property\n    def size(self): return 1\n    other: int = 1\n"
    found = report(OLD | {"vllm/models/parent.py": f"class Parent:\n{size}"})
    assert "### `vllm/models/parent.py`, `Parent.size` is new\n" in found
    assert "+    @property\n+    def size" in found and "Parent.other" not in found


def test_hunks_are_moved_before_the_release_is_pinned(monkeypatch, capsys):
    base = Base("vllm", "1.0.0", "cpu", sha256=None)
    monkeypatch.setattr(commands, "pinned_base", lambda _: base)
    assert commands.main(["rebase", "--version", "1.0.0", "--write"]) == 1
    assert "error: base.toml pins 1.0.0 already" in capsys.readouterr().err
