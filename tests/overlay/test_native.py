# SPDX-License-Identifier: Apache-2.0
"""Building the native kernel: optional, and one line says what failed."""

import pytest

from tools.overlay import native
from tools.overlay.base import ROOT
from vllm.platforms import current_platform


@pytest.mark.parametrize(
    ("program", "cxx", "why"),
    [
        ("ninja", "", "there is no C++ compiler (c++, g++, clang++, or CXX=<one>)"),
        ("g++", "", "failed: e.cpp:1: error: what it is."),
        ("other", "other -m64", "failed: e.cpp:1: error: what it is."),
    ],
)
def test_what_failed(program, cxx, why, tmp_path, monkeypatch, capfd):
    """PATH has only this program."""
    said = "In a file\ne.cpp:1: error: what it is\nOne error"
    (tmp_path / program).write_text(f"#!/bin/sh\necho '{said}' >&2\nexit 1\n")
    (tmp_path / program).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CXX", cxx)
    line = native.build(tmp_path / "tree")
    assert line.startswith("The native kernel was not built: ") and why in line
    assert capfd.readouterr() == ("", f"{line}\n")
    assert not (tmp_path / "tree" / native.LIBRARY).exists()


@pytest.mark.skipif(not native.compiler(), reason="there is no C++ compiler")
def test_library_is_built():
    """Otherwise the tests of its kernels would be skipped."""
    cpu = pytest.importorskip("vllm.v1.worker.gpu.spec_decode.unified.tree.cpu")
    if current_platform.is_cpu():
        assert cpu.why_not_loaded() is None, "run `make env`"
    header = (ROOT / "csrc/tree_structs.h").read_text()
    assert f"STRUCTS_VERSION = {cpu.STRUCTS_VERSION};" in header
