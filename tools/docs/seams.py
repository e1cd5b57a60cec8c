# SPDX-License-Identifier: Apache-2.0
"""The headers of all seams, as a table."""

import ast
import re

from tools.overlay.seams import read_lock

from . import ROOT

_PART = re.compile(r"^(Why|How|Upstream|Until): (.*?)(?=^\w+: |\Z)", re.M | re.S)


def seam_table() -> str:
    """Why each seam is there, and when it can go."""
    rows = ["| seam | why | until |", "| --- | --- | --- |"]
    for path in read_lock():
        header = ast.get_docstring(ast.parse((ROOT / path).read_text()))
        said = {key: " ".join(text.split()) for key, text in _PART.findall(header)}
        rows.append(f"| `{path}` | {said['Why']} | {said['Until']} |")
    return "\n".join(rows)
