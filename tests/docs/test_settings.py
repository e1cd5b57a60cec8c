# SPDX-License-Identifier: Apache-2.0
"""The reference of keys has each, with the config class's default and limits, and since
when those of this tree are there."""

import dataclasses
import re
from typing import Any

from annotated_types import Ge, Gt, Le
from pydantic.fields import FieldInfo

from tests.conftest import ROOT
from vllm.config import SpeculativeConfig
from vllm.engine.config_error import settable

ROW = re.compile(r"^\| (\*?)`(\w+)`\1 \| (\S+) \| (?:(\S.*?) )?\| .+ \|$", re.MULTILINE)


def expected(field: dataclasses.Field) -> tuple[str, str]:
    """Default and limits, as the page writes them."""
    info: Any = field.default
    told = info if isinstance(info, FieldInfo) else FieldInfo(default=info)
    default = {None: "unset", False: "false"}.get(told.default, str(told.default))
    least, most = "", ""
    for limit in told.metadata:
        match limit:
            case Ge(ge=value) | Gt(gt=value):
                least = f"{value + isinstance(limit, Gt)}"
            case Le(le=value):
                most = f"{value}"
    return default, f"{least} to {most}" if most else f"≥ {least}" if least else ""


def test_each_key_is_described():
    page = (ROOT / "docs/settings.md").read_text()
    found = {key: (default, limits) for _, key, default, limits in ROW.findall(page)}
    fields = {field.name: field for field in dataclasses.fields(SpeculativeConfig)}
    # The target's, and refused.
    names = settable(SpeculativeConfig) - {"tensor_parallel_size"}
    assert found == {name: expected(fields[name]) for name in names}


def test_since_when_is_a_version_of_the_changelog():
    found, known = (
        set(re.findall(pattern, (ROOT / page).read_text(), re.MULTILINE))
        for page, pattern in (
            ("docs/settings.md", r"since\s(\d[\w.+]*\w)"),
            ("CHANGELOG.md", r"^## \[(\S+)\]"),
        )
    )
    assert found and found <= known
