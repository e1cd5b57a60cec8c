# SPDX-License-Identifier: Apache-2.0
"""Building the native input kernel: optional, and one line says what failed."""

import ctypes
import shutil

import pytest

from tools.overlay import native
from tools.overlay.base import ROOT

LIBRARY = "vllm/v1/worker/gpu/spec_decode/unified/_prepare_inputs.so"
needs_compiler = pytest.mark.skipif(
    native.compiler() is None, reason="there is no C++ compiler"
)
needs_cmake = pytest.mark.skipif(shutil.which("cmake") is None, reason="no cmake")


@pytest.fixture
def programs(tmp_path, monkeypatch):
    """Leaves only programs of these names on the path, which do nothing."""

    def only(*names: str) -> None:
        folder = tmp_path / "bin"
        folder.mkdir()
        for name in names:
            (folder / name).write_text("#!/bin/sh\n")
            (folder / name).chmod(0o755)
        monkeypatch.setenv("PATH", str(folder))
        monkeypatch.delenv("CXX", raising=False)

    return only


def expect_one_line(tmp_path, capfd, why: str) -> None:
    tree = tmp_path / "tree"
    line = native.build(tree)
    assert line.startswith(f"The native input kernel was not built: {why}")
    out, error = capfd.readouterr()
    assert (out, error) == ("", f"{line}\n")
    assert not tree.exists()


def test_no_compiler(programs, tmp_path, capfd):
    programs("cmake", "ninja")
    assert native.build_requirements() == []
    expect_one_line(tmp_path, capfd, "there is no C++ compiler (c++, g++, clang++, or")


def test_no_cmake(programs, tmp_path, capfd):
    programs("g++")
    assert native.build_requirements() == ["cmake>=3.18", "ninja"]
    expect_one_line(tmp_path, capfd, "there is no cmake")


def test_only_what_is_missing_is_fetched(programs):
    programs("clang++", "cmake", "make")
    assert native.build_requirements() == []


def test_compiler_is_chosen_by_cxx(programs, monkeypatch):
    programs("g++", "other")
    monkeypatch.setenv("CXX", "other -m64")
    assert native.compiler().endswith("/other")
    monkeypatch.setenv("CXX", "nowhere")
    assert native.compiler() is None


@needs_compiler
@needs_cmake
def test_sources_that_do_not_compile(tmp_path, capfd):
    shutil.copy(ROOT / "CMakeLists.txt", tmp_path)
    (tmp_path / "csrc").mkdir()
    (tmp_path / "csrc/prepare_inputs.cpp").write_text("int f() { return nothing; }\n")
    line = native.build(tmp_path / "tree", root=tmp_path)
    assert "`cmake --build` failed: " in line and "error:" in line
    assert "\n" not in line and capfd.readouterr().err == f"{line}\n"


@needs_compiler
@needs_cmake
def test_library(tmp_path):
    assert native.build(tmp_path) is None
    assert ctypes.CDLL(str(tmp_path / LIBRARY)).prepare_first_pass
