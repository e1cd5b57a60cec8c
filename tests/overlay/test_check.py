# SPDX-License-Identifier: Apache-2.0
"""The checks find each kind of planted violation, and nothing in good files."""

import pytest

from tests.overlay.fakes import addition, seam, write_overlay, write_wheel
from tools.overlay.check import check
from tools.overlay.repeats import repeats, telling_lines

COPIED = "".join(f"    value_{i} = compute(value, {i})\n" for i in range(6))
PART, SUB = "vllm/part.py", "vllm/sub/__init__.py"
BASE = {
    PART: f"def work(value):\n{COPIED}    return value\n",
    "vllm/other.py": "OTHER = 1\n",
    "vllm/data.json": "{}",
    "vllm/native.abi3.so": "",
    SUB: "",
}
BASE_SOURCES = [(PART, BASE[PART])]
GOOD = {PART: seam(PART), "vllm/new/__init__.py": "", "vllm/new/it.py": addition()}


@pytest.fixture
def problems(tmp_path):
    def run(files: dict[str, str], **more: str) -> list[str]:
        wheel = write_wheel(tmp_path, BASE)
        root = write_overlay(tmp_path / "repo", {**GOOD, **files}, wheel)
        if "lock" in more:
            (root / "seams.lock").write_text(more["lock"])
        return check(wheel, root)

    return run


def test_good_tree(problems):
    assert problems({}) == []


@pytest.mark.parametrize(
    ("path", "text", "expected"),
    [
        ("vllm/__init__.py", addition(), "vllm/__init__.py:1: hides the installed"),
        ("vllm/_upstream/a.py", addition(), "_upstream/a.py:1: this folder is for"),
        ("vllm/data.json", "[]", "vllm/data.json:1: replaces a file"),
        ("vllm/part/__init__.py", "", ":1: hides the base's vllm/part.py"),
        ("vllm/sub.py", addition(), ":1: hides the base's vllm/sub/__init__.py"),
        ("vllm/native.py", addition(), ":1: hides the base's vllm/native.abi3.so"),
        ("vllm/new/it.py", '"""Doc."""\n', "it.py:1: has no licence line"),
        ("vllm/new/it.py", addition().partition("\n")[0], ":1: has no docstring"),
        ("vllm/new/it.py", addition("x = ("), "it.py:3: '(' was never closed, mend"),
        (PART, seam("vllm/other.py"), f"{PART}:2: is a seam without its title"),
        (PART, seam(PART).replace("How:", "So:"), "header has no part `How:`"),
        (PART, seam(PART).replace("Until:", ""), "header has no part `Until:`"),
        (PART, seam(PART).replace("(__name__)", "('x')"), ":1: stands on nothing"),
        (PART, seam(PART, "x = 1\n" * 50), f"{PART}:60: is 62 lines long"),
        (SUB, "", f"{SUB}:2: is a seam without its title"),
        (PART, seam(PART, f"def f(value):\n{COPIED}"), f"{PART}:14: repeats 6 lines"),
        ("tests/t.py", f"if 1:\n{COPIED}", "tests/t.py:2: repeats 6 lines of the base"),
        ("tools/t.py", f"if 1:\n{COPIED}", "s vllm/part.py:2, cut the change"),
    ],
)  # fmt: skip
def test_planted_violation(problems, path, text, expected):
    found = problems({path: text})
    assert [line for line in found if expected in line], found


def test_lock(problems):
    lock = f"{'0' * 64}  {PART}\n{'0' * 64}  vllm/other.py\n{'0' * 64}  vllm/gone.py\n"
    found = problems({SUB: seam(SUB)}, lock=lock)
    assert [line.partition(", review it and run `lock`")[0] for line in found] == [
        f"{SUB}:1: not in seams.lock",
        f"{PART}:1: the base's file is not the one this seam was written for",
        "vllm/other.py:1: in seams.lock, but no seam stands on it any more",
        "vllm/gone.py:1: the base no longer has this file",
    ]


def test_repeats_sees_through_layout():
    ours = COPIED.replace("    ", "  ").replace("\n", "  # why\n\n# more\n")
    (found,) = repeats({"ours.py": f"import x\n{ours}"}, BASE_SOURCES)
    assert found.startswith("ours.py:2: repeats 6 lines of the base's vllm/part.py:2,")


def test_repeats_joins_runs_and_keeps_them_apart():
    text = f"{COPIED}    return value\n"
    (found,) = repeats({"a.py": text}, BASE_SOURCES)
    assert "repeats 7 lines" in found
    twice = repeats({"a.py": f"{COPIED}different = line\n{COPIED}"}, BASE_SOURCES)
    assert [line.partition(" ")[0] for line in twice] == ["a.py:1:", "a.py:8:"]
    assert repeats({"a.py": COPIED.replace("value_3", "other")}, BASE_SOURCES) == []


def test_what_says_nothing():
    text = "import a\nfrom b import (  # (\n    cccccc,\n    dddddd,\n)\n# words\n"
    text += "def interface(\n    argument='(',\n    other=(),\n) -> tuple[()]:\n"
    text += '"""\n):\nelse:\n    pass\n\ndefined = 1\n'
    assert telling_lines(text) == [(16, "defined=1")]
