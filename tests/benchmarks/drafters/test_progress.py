# SPDX-License-Identifier: Apache-2.0
"""The progress of a comparison, in a terminal and without one."""

import sys

import pytest

from vllm.benchmarks.drafters.progress import Progress


@pytest.mark.parametrize("is_terminal", [True, False])
def test_progress(monkeypatch, capsys, is_terminal):
    """A bar in a terminal, otherwise one line per engine."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal, raising=False)
    progress = Progress(["start", "measure"] * 2)
    for name in ("pard", "eagle3"):
        progress.begin(name)
        for kind in ("start", "measure"):
            with progress.doing(kind, f"{name}: {kind}"):
                pass
    progress.bar.close()
    said = capsys.readouterr().err
    assert not progress.left.total()
    if is_terminal:
        assert "eagle3: measure: 100%" in said and "left" in said
    else:
        assert said == "  0% 00:00 pard\n 50% 00:00 eagle3\n"
