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
from tools.overlay.relied import relied_on
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
from importlib.metadata import version
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


assert "cpu" in version("vllm")  # by which vLLM tells its platform
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
        found = relied_on(Release(archive), root)
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
        "0 members that changed, 0 hunks to place by hand, 0 modules to mend, "
        "0 guesses to look at, 0 requirements changed."
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
    assert "- `vllm.added`: ImportError: cannot import name 'LIMIT'" in found
    assert "from 'vllm.tools' (vllm/tools.py)" in found  # without temporary folders


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


def guesses_of(report: str) -> list[str]:
    return re.findall(r"(?m)^- `.* (?:names|sets) .*$", report)


def test_gone_names_are_looked_up(report, tmp_path):
    """In the report on members, on imports, and in strings and imports of tests."""
    new = OLD | {"vllm/tools.py": "def helper(): return 1\nclass Box: pass\n"}
    new |= {"vllm/moved.py": "LIMIT = 1\ndef unused(): pass\n"}
    (tmp_path / "repo/tests").mkdir(parents=True)
    text = 'from vllm.tools import unused, helper\nN = "vllm.tools.LIMIT", "vllm.no"'
    (tmp_path / "repo/tests/test_it.py").write_text(text)
    found = report(new)
    assert "`vllm/tools.py`, `LIMIT` is gone, now in `vllm/moved.py`" in found
    assert "(vllm/tools.py), now in `vllm/moved.py`" in found
    assert guesses_of(found) == [
        f"- `tests/test_it.py:{line}` names `vllm.tools.{name}`, now in `vllm/moved.py`"
        for line, name in ((1, "unused"), (2, "LIMIT"))
    ]


SETS = """
from vllm.models import Child


class Sets(Child):
    length = 1

    def run(self):
        self.size, self.rest = 1, 2
"""
PROPERTY = "    @property\n    def {}(self): return 1\n"
SETTER = "    @size.setter\n    def size(self, value): pass\n"


@pytest.mark.parametrize("setter", ["", SETTER])
def test_attributes_that_became_properties(report, setter, monkeypatch):
    monkeypatch.setitem(OVERLAY, "vllm/added.py", addition(SETS))
    body = "".join(map(PROPERTY.format, ("size", "length", "other"))) + setter
    found = report(OLD | {"vllm/models/parent.py": f"class Parent:\n{body}"})
    there = "which `Parent` in `vllm/models/parent.py` has as a property now"
    wanted = [f"- `vllm/added.py:8` sets `length`, {there}"]
    if not setter:
        wanted += [f"- `vllm/added.py:11` sets `size`, {there}"]
    assert guesses_of(found) == wanted


def test_hunks_are_moved_before_the_release_is_pinned(monkeypatch, capsys):
    base = Base("vllm", "1.0.0", "cpu", sha256=None)
    monkeypatch.setattr(commands, "pinned_base", lambda _: base)
    assert commands.main(["rebase", "--version", "1.0.0", "--write"]) == 1
    assert "base.toml pins 1.0.0 already" in capsys.readouterr().err
