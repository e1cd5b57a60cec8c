# SPDX-License-Identifier: Apache-2.0
"""Composing: what lands in the tree, and when it is refused."""

import pytest

from tests.overlay.fakes import addition, composed, edit, write_wheel
from tools.overlay.base import OverlayError
from tools.overlay.edits import NOTE
from tools.overlay.lock import read_lock

PART, NEW = "vllm/part.py", "vllm/new/extra.py"
RELEASE = {PART: "def f():\n    return 1\n\n\ndef g():\n    return 1\n"}
HUNKS = "@@ imports\nfrom vllm.new.extra import more\n@@ f, before line 1\n@more\n"
ADDITION = addition("def more(f):\n    return lambda: f() + 1\n")
OVERLAY = {f"{PART}.edit": edit(HUNKS), NEW: ADDITION}
SAY = "import vllm.part as part, inspect; print(part.f(), inspect.getfile(part))"


def test_tree(tmp_path):
    tree = composed(tmp_path, RELEASE, OVERLAY)
    said = tree.run(SAY)
    assert said == f"2 {tree.folder / PART}"
    assert (tree.folder / PART).read_text().endswith(NOTE.format(path=PART))
    assert not list(tree.folder.rglob("*.edit"))
    assert (tree.folder / "info/METADATA").exists()


def test_additions_are_live_in_editable_tree(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_ALLOW_CHANGED_MEMBERS", "1")
    tree = composed(tmp_path, RELEASE, OVERLAY, link=True)
    # Of another length: Python compares bytecode's seconds and lengths.
    (tree.root / NEW).write_text(ADDITION.replace("+ 1", "+ 10"))
    assert tree.run(SAY).startswith("11 ")
    (tree.root / NEW).unlink()
    (tree.root / f"{PART}.edit").write_text("")
    tree.compose(link=True)
    assert not (tree.folder / "vllm/new").exists()
    assert tree.run(SAY).startswith("1 ")


def test_lock_has_touched_members_only(tmp_path, monkeypatch):
    monkeypatch.delenv("VLLM_ALLOW_CHANGED_MEMBERS", raising=False)
    tree = composed(tmp_path, RELEASE, OVERLAY)
    assert set(read_lock(tree.root)) == {(PART, "f")}
    other = RELEASE[PART].replace("g():\n    return 1", "g():\n    return 2")
    tree.wheel = write_wheel(tmp_path, {PART: "import os\n\n" + other}, "2.0.0")
    tree.compose()
    assert tree.run(SAY).startswith("2 ")
    changed = RELEASE[PART].replace("f():\n    return 1", "f():\n    return 2")
    tree.wheel = write_wheel(tmp_path, {PART: changed}, "3.0.0")
    message = f"(?s)\n  {PART}: f changed\n.*VLLM_ALLOW_CHANGED_MEMBERS=1"
    with pytest.raises(OverlayError, match=message):
        tree.compose()
    monkeypatch.setenv("VLLM_ALLOW_CHANGED_MEMBERS", "1")
    tree.compose()
    assert tree.run(SAY).startswith("3 ")


def test_failed_compose_keeps_tree(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_ALLOW_CHANGED_MEMBERS", "1")
    tree = composed(tmp_path, RELEASE, OVERLAY)
    before = (tree.folder / PART).read_text()
    tree.wheel = write_wheel(tmp_path, {}, "2.0.0")
    with pytest.raises(OverlayError, match=f"{PART}.edit:1: vLLM has no {PART}"):
        tree.compose()
    assert (tree.folder / PART).read_text() == before
