# SPDX-License-Identifier: Apache-2.0
"""How the native input kernel is found, and that both sides mean the same structs."""

import pytest

from tools.overlay.base import ROOT
from tools.overlay.native import compiler
from vllm.platforms import current_platform
from vllm.v1.worker.gpu.spec_decode.unified import inputs, native


@pytest.fixture
def warnings(monkeypatch) -> list[str]:
    """What is logged while the library is looked for afresh."""
    lines: list[str] = []
    monkeypatch.setattr(
        native.logger, "warning", lambda text, *args: lines.append(text % args)
    )
    native.load.cache_clear()
    yield lines
    native.load.cache_clear()


def expect_one_line(warnings: list[str], why: str) -> None:
    assert inputs.native_library() is None
    assert inputs.native_library() is None
    (line,) = warnings
    assert f"little slower than as C++, for want of {why}" in line
    assert line.endswith("Install a C++ compiler (g++ or clang++), then vLLM again.")


@pytest.mark.skipif(not current_platform.is_cpu(), reason="it is for CPUs")
@pytest.mark.skipif(compiler() is None, reason="there is no C++ compiler")
def test_it_is_built():
    """Else tests of what it computes are skipped."""
    assert inputs.native_library() is not None, "run `make env`"


def test_not_built(warnings, tmp_path, monkeypatch):
    monkeypatch.setattr(native, "LIBRARY", tmp_path / "_prepare_inputs.so")
    expect_one_line(warnings, "_prepare_inputs.so: it was not built.")


def test_not_a_library(warnings, tmp_path, monkeypatch):
    library = tmp_path / "_prepare_inputs.so"
    library.write_text("for another machine")
    monkeypatch.setattr(native, "LIBRARY", library)
    expect_one_line(warnings, f"_prepare_inputs.so: {library}: ")


@pytest.mark.skipif(not native.LIBRARY.exists(), reason="the library was not built")
def test_built_from_other_sources(warnings, monkeypatch):
    """A field that moved, or has another type."""
    monkeypatch.setattr(native, "STRUCTS", native.STRUCTS[::-1])
    expect_one_line(warnings, "_prepare_inputs.so: it was built from other sources.")


def test_the_header_is_that_of_the_declarations():
    found = (ROOT / "csrc" / "structs.h").read_text()
    assert found == native.header(), "run `python csrc/write_structs.py`"
