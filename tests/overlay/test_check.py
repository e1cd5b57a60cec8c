# SPDX-License-Identifier: Apache-2.0
"""The checks find each kind of planted violation, and nothing in good files."""

import pytest

from tests.overlay.fakes import HEAD, addition, edit, write_overlay, write_wheel
from tools.overlay.check import check
from tools.overlay.repeats import shared

COPIED = "".join(f"    value_{i} = compute(value, {i})\n" for i in range(6))
PART, SUB, NEW = "vllm/part.py", "vllm/sub/__init__.py", "vllm/new/it.py"
EDIT = f"{PART}.edit"
RELEASE = {
    PART: f"def work(value):\n{COPIED}    return value\n",
    "vllm/native.abi3.so": "",
    SUB: "",
}
GOOD = {
    EDIT: edit("@@ work, after line 1\n    value += 1\n"),
    "vllm/new/__init__.py": "",
    NEW: addition(),
}


@pytest.fixture
def repository(tmp_path):
    def make(files: dict[str, str]):
        wheel = write_wheel(tmp_path, RELEASE)
        return wheel, write_overlay(tmp_path / "repo", {**GOOD, **files}, wheel)

    return make


def test_good_tree(repository):
    assert check(*repository({})) == []


@pytest.mark.parametrize(
    ("path", "text", "expected"),
    [
        (PART, addition(), f"{PART}:1: vLLM has this file, change it by {PART}.edit"),
        ("vllm/part/__init__.py", "", ":1: hides vLLM's vllm/part.py"),
        ("vllm/sub.py", addition(), ":1: hides vLLM's vllm/sub/__init__.py"),
        ("vllm/native.py", addition(), ":1: hides vLLM's vllm/native.abi3.so"),
        (EDIT, HEAD.replace("Until: then.", "Until: ?"), "say `# Until: …`"),
        (EDIT, HEAD.replace("# Patch: slug\n", ""), "say `# Patch: …`"),
        (EDIT, HEAD.replace("slug", "other"), "series.toml has no patch 'other'"),
        (EDIT, edit("@@ work, at the end\nx = (\n"), "is no Python at 'x = ('"),
        (
            EDIT,
            edit("@@ work, at the end\n" + "    x()\n" * 9),
            ":5: has 9 lines, move",
        ),
        (
            EDIT,
            edit("@@ work, replacing lines 7 to 8\n    x()\n    return value\n"),
            ":5: repeats a line of vLLM's, replace fewer lines: '@@ work, replacing",
        ),
        (EDIT, edit(f"@@ work, at the end\n{COPIED}"), ":1: repeats lines of vLLM's"),
        (NEW, addition(f"def f(value):\n{COPIED}"), f"{NEW}:4: repeats lines of"),
        ("tools/t.py", f"if 1:\n{COPIED}", "s vllm/part.py:2, cut the change"),
    ],
)
def test_planted_violation(repository, path, text, expected):
    found = check(*repository({path: text}))
    assert [line for line in found if expected in line], found


def test_unreadable_files(repository):
    wheel, root = repository({})
    (root / EDIT).write_text("x = 1\n")
    assert check(wheel, root) == [f"{EDIT}:1: a section starts with '# Why: …'"]
    (root / EDIT).unlink()
    (root / NEW).write_text(addition("x = ("))
    assert check(wheel, root) == [f"{NEW}:3: '(' was never closed, mend it"]


def test_lock(repository):
    wheel, root = repository({})
    (root / EDIT).write_text(edit("@@ module, at the end\nx = 1\n"))
    (root / "edits.lock").write_text(f"{'0' * 64}  {PART}  work\n")
    assert check(wheel, root) == [
        f"{PART}: module is not in edits.lock, review it and run `lock`",
        f"{PART}: work changed, review it and run `lock`",
        "edits.lock:1: is not of these files, run `lock`",
    ]


def test_repeats_ignore_layout():
    theirs = [(PART, RELEASE[PART])]
    ours = COPIED.replace("    ", "  ").replace("\n", "  # why\n\n# more\n")
    (found,) = shared({"ours.py": f"import x\n{ours}"}, theirs)
    assert found.startswith("ours.py:2: repeats lines of vLLM's vllm/part.py:2,")
    twice = shared({"a.py": f"{COPIED}different = line\n{COPIED}"}, theirs)
    assert [line.partition(" ")[0] for line in twice] == ["a.py:1:", "a.py:8:"]
    assert shared({"a.py": COPIED.replace("value_3", "other")}, theirs) == []
