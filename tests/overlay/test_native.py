# SPDX-License-Identifier: Apache-2.0
"""Building the native kernels: optional, and one line says what failed."""

import pytest

from tools.overlay import native
from tools.overlay.base import ROOT
from vllm.platforms import current_platform


@pytest.mark.parametrize(
    ("programs", "cxx", "fetched", "why"),
    [
        (["cmake", "ninja"], None, [], "there is no C++ compiler (c++, g++, clang++"),
        (["g++"], None, ["cmake>=3.18", "ninja"], "there is no cmake"),
        (["other", "make"], "other -m64", ["cmake>=3.18"], "there is no cmake"),
    ],
)
def test_missing_programs(programs, cxx, fetched, why, tmp_path, monkeypatch, capfd):
    """PATH has only these programs."""
    for name in programs:
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CXX", cxx or "")
    assert native.build_requirements() == fetched
    line = native.build(tmp_path / "tree")
    assert line.startswith(f"The native kernels were not built: {why}")
    assert capfd.readouterr() == ("", f"{line}\n")
    assert not (tmp_path / "tree").exists()


@pytest.mark.skipif(native.compiler() is None, reason="there is no C++ compiler")
def test_library_is_built():
    """Otherwise the tests of its kernels would be skipped."""
    cpu = pytest.importorskip("vllm.v1.worker.gpu.spec_decode.unified.tree.cpu")
    if current_platform.is_cpu():
        assert cpu.why_not_loaded() is None, "run `make env`"
    header = (ROOT / "csrc/tree_structs.h").read_text()
    assert f"STRUCTS_VERSION = {cpu.STRUCTS_VERSION};" in header
