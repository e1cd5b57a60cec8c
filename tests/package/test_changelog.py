# SPDX-License-Identifier: Apache-2.0
"""The changelog is in the form of Keep a Changelog, and of this version."""

import re
from datetime import date

from tools.overlay.base import ROOT, load_config

LINES = (ROOT / "CHANGELOG.md").read_text().splitlines()
VERSIONS = [line.removeprefix("## ") for line in LINES if line.startswith("## ")]
KINDS = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


def test_newest_version_is_that_of_the_tree():
    config = load_config()
    assert VERSIONS[0].startswith(f"[{config['version']}+{config['label']}] - ")


def test_versions_have_dates():
    for at, version in enumerate(VERSIONS):
        when = re.fullmatch(r"\[[\d.]+\+\w+\.\d+\] - (.+)", version)[1]
        assert (when == "unreleased" and at == 0) or date.fromisoformat(when)


def test_kinds_of_changes():
    found = [line.removeprefix("### ") for line in LINES if line.startswith("### ")]
    assert found and set(found) <= KINDS
