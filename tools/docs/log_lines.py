# SPDX-License-Identifier: Apache-2.0
"""What this tree may warn of, from the calls in its source."""

import ast
import re
from collections.abc import Iterator

from . import ROOT

_WARNINGS = ("warning", "warning_once")


def warning_table() -> str:
    """Each warning, with `…` for what varies, and the file that says it."""
    rows = ["| warning | said by |", "| --- | --- |"]
    for path in sorted((ROOT / "vllm").rglob("*.py")):
        for line in _warnings(ast.parse(path.read_text())):
            rows.append(f"| {line} | `{path.relative_to(ROOT)}` |")
    return "\n".join(rows)


def _warnings(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        if is_call and node.func.attr in _WARNINGS:
            template = ast.literal_eval(node.args[0])
            yield re.sub(r"%[-.\d]*[srdf]", "…", template).replace("|", "\\|")
