# SPDX-License-Identifier: Apache-2.0
"""Hunks are placed where their headers say, and errors in them are reported."""

import pytest

from tests.overlay.fakes import HEAD
from tools.overlay.base import OverlayError
from tools.overlay.edits import composed, parse
from tools.overlay.members import Source

PATH = "vllm/part.py"
TEXT = '''\
# A licence.
"""What the module is for."""

import os
from typing import (
    Any,
)

LIMIT = 1
if os.name == "posix":
    LIMIT = 2
    def chosen(): return 1


class Config:
    """A config."""

    size: int = 1
    """How large."""

    @property
    def limit(self):
        return self.size

    @limit.setter
    def limit(self, value):
        self.size = value


def make(first,
         second):
    first = 1
    return first
'''


def result(*hunks: str, text: str = TEXT) -> str:
    edit = parse(PATH, HEAD + "".join(hunks))
    assert parse(PATH, edit.text()) == edit
    assert edit.text() == HEAD + "".join(hunks)
    return composed(Source(PATH, text), edit.hunks())


# Header and lines of a hunk, and what the composed file has there.
PLACES = [
    ("imports", "import ours\n", "    Any,\n)\nimport ours\n"),
    ("module, at the end", "x = 1\n", "    return first\nx = 1\n"),
    ("LIMIT, before line 1", "x = 1\n", "\nx = 1\nLIMIT = 1\n"),
    ("LIMIT, removing line 1", "", ")\n\nif os.name"),
    ("chosen, before line 1", "    x = 1\n", "= 2\n    x = 1\n    def chosen"),
    ("Config, replacing line 1", "class Config(M):\n", "\nclass Config(M):\n    "),
    ("Config, at the end", "\n    x = 1\n", "    self.size = value\n\n    x = 1\n"),
    ("Config.size, after line 1", "    x\n", 'int = 1\n    x\n    """How'),
    ("Config.size, replacing line 2", '    """B."""\n', 'int = 1\n    """B."""\n'),
    ("Config.limit, before line 1", "    @ours\n", "\n    @ours\n    @property\n"),
    ("Config.limit[2], after line 2", "        x\n", "value):\n        x\n"),
    ("make, after line 2", "    x\n", "second):\n    x\n    first"),
    ("make, removing line 3", "", "second):\n    return"),
    ("make, replacing line 3", "    x\n", "second):\n    x\n    return"),
    ("make, replacing lines 1 to 3", "def make():\n", "\ndef make():\n    return"),
    ("make, at the end", "    x\n", "    return first\n    x\n"),
]


@pytest.mark.parametrize(
    ("header", "lines", "expected"),
    [*PLACES, ("module, after line 8", "x = 1\n", "\nx = 1\nLIMIT = 1\n")],
)
def test_hunk_placement(header, lines, expected):
    assert expected in result(f"@@ {header}\n{lines}")


def test_hunks_at_same_place_keep_order():
    hunks = [f"@@ make, after line 3\n    {name} = 1\n" for name in "ba"]
    hunks.insert(1, "\n" + HEAD.partition("\n")[2])  # in another section
    assert "first = 1\n    b = 1\n    a = 1\n    return" in result(*hunks)
    # Line numbers are the release's, not the composed file's.
    replaced = "@@ make, replacing line 4\n    return 2\n"
    assert "b = 1\n    a = 1\n    return 2\n" in result(*hunks, replaced)


def test_imports_in_file_without_imports():
    assert result("@@ imports\nimport a\n", text="# L.\nx = 1\n") == (
        "# L.\nimport a\nx = 1\n"
    )
    text = '"""Doc."""\nx = 1\n'
    assert result("@@ imports\nimport a\n", text=text).startswith('"""Doc."""\nimport')


@pytest.mark.parametrize(
    ("hunks", "error"),
    [
        ("@@ gone, after line 1\nx\n", ":5: vLLM's file has no gone: '@@ gone, after"),
        ("@@ make, after line 5\nx\n", ":5: make has only 4 lines"),
        ("@@ make, before line 2\nx\n", "before line 2' is not one of '@@ <m"),
        ("@@ make, replacing lines 3 to 2\nx\n", "means no line"),
        ("@@ make, replacing line 3\n", "or removed without"),
        ("x = 1\n", ":5: before our lines stands one of"),
        (
            "@@ make, replacing lines 3 to 4\nx\n@@ make, removing line 4\n",
            ":7: another hunk replaces this line: '@@ make, removing line 4'",
        ),
    ],
)
def test_errors(hunks, error):
    with pytest.raises(OverlayError) as caught:
        result(hunks)
    assert str(caught.value).startswith("vllm/part.py.edit:")
    assert error in str(caught.value)
